"""ImageNet and data sets laid out like it: folders of image files, or shards of TFRecords, read where they lie.

The order of the samples is a function of (seed, epoch), a sample's crop one of (seed, epoch, index): shards are read at random, by the
places of their records, so that both forms give the same batches. Images stay uint8 until they are on the device.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cifar_ipu.augment import ImageAugmentation
from cifar_ipu.data import DataFileError, DataNotFoundError
from lightning_ipu import machine
from lightning_ipu.data.fingerprint import fingerprint
from lightning_ipu.data.index import Index
from lightning_ipu.data.tf_example import only_bytes, parse_example
from lightning_ipu.data.tfrecord import TFRecordError, TFRecords
from lightning_ipu.errors import UserError
from lightning_ipu.files import atomic_write
from lightning_ipu.randomness import mix, name_word
from resnet_ipu.images import MEAN, STD, UNIFORMS, ImageError, center_crop, decode, half_scale_decoder, training_crop

__all__ = ["MANIFEST", "ImageDataset", "ImageNetDataModule", "class_order", "find_layout", "synset_words"]

EXTENSIONS = frozenset(b"jpg jpeg jpe jfif png webp bmp dib gif tif tiff ppm pgm pbm pnm".split())
SYSTEM_NAMES = frozenset(
    (b"thumbs.db", b"ehthumbs.db", b"desktop.ini", b"icon\r", b"__macosx", b"@eadir", b"$recycle.bin", b"lost+found")
    + (b"system volume information",)
)
FOLDERS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}  # names of a split's folder
STANDARD_SHARDS = {"train": (1024, 1_281_167), "validation": (128, 50_000)}  # files and images of ImageNet as TFRecords
STANDARD_CLASSES = 1000
MANIFEST = "shards.json"  # beside shards that `convert` wrote: classes, and how many records each file has
EVAL_SHARE = 224 / 256  # of the scaled image that the middle crop of an evaluation shows each way

_CROP = name_word("crop")
_SHARD = re.compile(r"(?P<split>train|validation|val|test)(?![a-z]).*?(?:(?P<number>\d+)-of-(?P<total>\d+))?(?P<suffix>\.tfrecords?)?$")


# -- names --------------------------------------------------------------------------------------------------------------------


def class_order(names: Sequence[str]) -> list[str]:
    """Class folders in the order of their labels: by number where every name is a whole number, else by the names' characters.

    So 2 comes before 10; all other names are in the order of torchvision's ImageFolder, ImageNet's synsets in that of its weights.
    """
    numeric = all(re.fullmatch(r"[0-9]+", name) for name in names)
    return sorted(names, key=lambda name: (int(name), name)) if numeric else sorted(names)


def synset_words(data_dir: Path) -> dict[str, str]:
    """What the classes are called in words, from LOC_synset_mapping.txt where there is one."""
    path = data_dir / "LOC_synset_mapping.txt"
    if not path.is_file():
        return {}
    return dict(line.split(" ", 1) for line in path.read_text().splitlines() if " " in line)


def _is_noise(name: bytes) -> bool:
    return name.startswith(b".") or name.lower() in SYSTEM_NAMES


# -- image files in folders ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class FolderImages:
    """Image files in folders. Their names are kept in a few arrays: there may be millions, which loader processes share.

    Args:
        root: the split's folder.
        folders: paths of the folders under it, the first, "", being itself.
        stamps: when each was last changed, in nanoseconds (int64).
        folder_of: number of the folder of each image (int32).
        names: all file names one after the other (uint8), each ending at its place in `ends` (int64).
        ignored: how many names were passed over, by reason.
        labels: class of each image (int64); -1 where it is not known.
    """

    root: str
    folders: list[str]
    stamps: np.ndarray
    folder_of: np.ndarray
    names: np.ndarray
    ends: np.ndarray
    ignored: dict[str, int]
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def file_name(self, number: int) -> str:
        """Name of an image's file, without its folder."""
        return os.fsdecode(self.names[self.ends[number - 1] if number else 0 : self.ends[number]].tobytes())

    def name(self, number: int) -> str:
        """Path of an image's file."""
        return os.path.join(self.root, self.folders[self.folder_of[number]], self.file_name(number))

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Bytes (uint8) and label of an image; raises OSError."""
        return np.fromfile(self.name(number), dtype=np.uint8), int(self.labels[number])

    def fingerprint(self) -> str:
        """Fingerprint of the images' names and labels; moving the whole root does not change it."""
        return fingerprint(self.folders, self.folder_of, self.names, self.ends, self.labels)

    def stamp(self, number: int) -> list[int]:
        """What changes when the image does."""
        status = os.stat(self.name(number))
        return [status.st_size, status.st_mtime_ns]

    def is_current(self) -> bool:
        """Whether no folder has been changed since they were listed."""
        try:
            return all(
                os.stat(os.path.join(self.root, folder)).st_mtime_ns == stamp
                for folder, stamp in zip(self.folders, self.stamps.tolist(), strict=True)
            )
        except OSError:
            return False


def list_images(root: Path) -> FolderImages:
    """List the image files under a split's folder, those in nested folders and behind links too, in the order of their names' bytes.

    Passed over, and counted by reason: hidden names and those that systems leave behind, files without an image's extension (in upper or
    lower case), links that lead nowhere, and folders that are met a second time within one class or lie above: there a loop of links ends.
    """
    folders: list[str] = []
    stamps, folder_of, names, ignored = [], [], [], Counter()
    above = {_identity(folder) for folder in (root.resolve(), *root.resolve().parents)}

    def visit(folder: str, seen: set[tuple[int, int]]) -> None:
        path = os.path.join(root, folder)
        number, below = len(folders), []
        folders.append(folder)
        stamps.append(os.stat(path).st_mtime_ns)
        with os.scandir(os.fsencode(path)) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            kind = _kind(entry)
            if _is_noise(entry.name):
                ignored["hidden or of the system"] += 1
            elif kind == "folder":
                below.append(os.fsdecode(entry.name))
            elif kind == "link":
                ignored["links that lead nowhere"] += 1
            elif kind == "file" and (extension := entry.name.rpartition(b".")[2].lower()) in EXTENSIONS:
                names.append(entry.name)
                folder_of.append(number)
            else:
                what = f".{os.fsdecode(extension)}" if kind == "file" and extension != entry.name.lower() else "no extension"
                ignored[f"no images ({what})"] += 1
        for name in below:
            inside = os.path.join(folder, name)
            met = set(above) if folder == "" else seen  # two classes may be links to one folder
            if (identity := _identity(os.path.join(root, inside))) in met:
                ignored["links that lead back"] += 1
            else:
                met.add(identity)
                visit(inside, met)

    visit("", above)
    return FolderImages(
        root=os.fspath(root),
        folders=folders,
        stamps=np.array(stamps, dtype=np.int64),
        folder_of=np.array(folder_of, dtype=np.int32),
        names=np.frombuffer(b"".join(names), dtype=np.uint8),
        ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        ignored=dict(ignored),
    )


def _identity(path: str | os.PathLike[str]) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _kind(entry: os.DirEntry) -> Literal["folder", "file", "link", "other"]:
    try:
        if entry.is_dir():
            return "folder"
        if entry.is_file():
            return "file"
    except OSError:  # a link to itself
        pass
    return "link" if entry.is_symlink() else "other"


def flat_labels(images: FolderImages, classes: Sequence[str], *, data_dir: Path) -> np.ndarray:
    """Labels of a validation folder without class folders: from LOC_val_solution.csv, or from the development kit's files.

    The kit's ILSVRC2012_validation_ground_truth.txt gives the k-th image a number, meta.mat that number a synset; it takes scipy to read.

    Raises:
        DataNotFoundError: neither is there. DataFileError: one of them does not fit the images or classes.
    """
    root = Path(images.root)
    places = [data_dir, root, root.parent, *(root.parents[depth] for depth in (1, 2, 3) if depth < len(root.parents))]
    for place in places:
        if (path := place / "LOC_val_solution.csv").is_file():
            with path.open(newline="") as file:
                synsets = {row["ImageId"]: row["PredictionString"].split(" ", 1)[0] for row in csv.DictReader(file)}
            break
        for kit in (place, *sorted(place.glob("ILSVRC2012_devkit*"))):
            if (path := kit / "data" / "ILSVRC2012_validation_ground_truth.txt").is_file():
                names = _synsets_of_kit(path.parent / "meta.mat")
                synsets = {f"ILSVRC2012_val_{number:08}": names[int(line)] for number, line in enumerate(path.read_text().split(), start=1)}
                break
        else:
            continue
        break
    else:
        raise DataNotFoundError(
            f"{root} has images but no class folders: put LOC_val_solution.csv or the folder ILSVRC2012_devkit_t12 into {data_dir}, which say"
            " what they show"
        )
    label_of, labels = {name: label for label, name in enumerate(classes)}, []
    for number in range(len(images)):
        stem = Path(images.file_name(number)).stem
        if (synset := synsets.get(stem)) not in label_of:
            what = f"gives {synset}, which no training folder has, for" if synset else "does not know"
            raise DataFileError(f"{path}: it {what} the image {images.name(number)}")
        labels.append(label_of[synset])
    return np.array(labels, dtype=np.int64)


def _synsets_of_kit(path: Path) -> dict[int, str]:
    try:
        from scipy.io import loadmat
    except ImportError:
        raise DataFileError(f"{path}: it takes scipy to read it: pip install scipy, or use LOC_val_solution.csv") from None
    synsets = loadmat(path, squeeze_me=True, variable_names=["synsets"])["synsets"]
    return {int(number): str(synset) for number, synset in zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)}


# -- shards of TFRecords ------------------------------------------------------------------------------------------------------


class ShardImages:
    """Images in TFRecords with the features `image/encoded` and `image/class/label`, which counts from 1.

    Args:
        records: the records of all shards of a split.
        num_classes: labels are checked against it.
    """

    def __init__(self, records: TFRecords, *, num_classes: int) -> None:
        self.records, self.num_classes = records, num_classes

    def __len__(self) -> int:
        return len(self.records)

    def fingerprint(self) -> str:
        """Fingerprint of the shards' names and the positions of their records; moving them all does not change it."""
        return self.records.fingerprint()

    def name(self, number: int) -> str:
        """File, record and byte."""
        path, record, at = self.records.where(number)
        return f"{path}: record {record} at byte {at}"

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Bytes (uint8) and label of an image; raises TFRecordError."""
        record = self.records[number]
        try:
            features = parse_example(record)
            data = np.frombuffer(only_bytes(features, "image/encoded"), dtype=np.uint8)
            label = features.get("image/class/label")
            if not isinstance(label, np.ndarray) or label.dtype != np.int64 or len(label) != 1:
                raise UserError("feature 'image/class/label' must be one whole number")
            if not 1 <= label[0] <= self.num_classes:
                raise UserError(f"label {label[0]} must lie between 1 and {self.num_classes}, the number of classes")
        except ValueError as error:
            raise self.records.error(number, str(error)) from None
        return data, int(label[0]) - 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the splits of a data set lie: each in a folder of images, or in shard files."""

    folders: dict[str, Path]
    shards: dict[str, list[Path]]

    @property
    def manifest(self) -> Path | None:
        """The file that says what is in the shards; None where there is none."""
        places = {path.parent for paths in self.shards.values() for path in paths}
        return next((path for place in sorted(places) for path in (place / MANIFEST, place.parent / MANIFEST) if path.is_file()), None)


def find_layout(data_dir: Path, *, expected: Mapping[str, int | None] | None = None) -> Layout:
    """Find train/, val/ or validation/ and test/ in a folder, or in it the folder CLS-LOC of ImageNet's archive, or shards like
    train-00000-of-01024, in the folder itself or in those.

    Args:
        data_dir: the folder.
        expected: how many shard files a split should have, where that is not what their names say.

    Raises:
        DataNotFoundError: there are no images to train or validate on, or to predict. DataFileError: shard files are missing, named one by one.
    """
    folders: dict[str, Path] = {}
    shards: dict[str, list[Path]] = {}
    for root in (data_dir, data_dir / "ILSVRC" / "Data" / "CLS-LOC", data_dir / "Data" / "CLS-LOC"):
        for split, names in FOLDERS.items():
            for path in (root / name for name in names):
                if path.is_dir() and split not in folders | shards:
                    if found := _shards_in(path, split):
                        shards[split] = found
                    else:
                        folders[split] = path
        if folders or shards:
            break
    for split in FOLDERS:
        if split not in folders | shards and data_dir.is_dir() and (found := _shards_in(data_dir, split)):
            shards[split] = found
    for split, paths in shards.items():
        _check_shard_names(split, paths, (expected or {}).get(split))
    if not folders and not shards:
        what = "has neither" if data_dir.is_dir() else "is no folder: there should be"
        raise DataNotFoundError(
            f"{data_dir} {what} train/ and val/, with a folder of images for each class, {'nor' if data_dir.is_dir() else 'or'} shards named"
            " train-00000-of-01024 and validation-00000-of-00128"
        )
    return Layout(folders=folders, shards=shards)


def _shards_in(folder: Path, split: str) -> list[Path]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _SHARD.match(entry.name)
            if match and match["split"] in FOLDERS[split] and (match["total"] or match["suffix"]) and entry.is_file():
                found.append(folder / entry.name)
    return sorted(found)


def _check_shard_names(split: str, paths: list[Path], expected: int | None) -> None:
    if expected is not None:
        if len(paths) != expected:
            raise DataFileError(f"{paths[0].parent}: {len(paths)} {split} shards are there, {expected} should be")
        return
    matches = [_SHARD.match(path.name) for path in paths]
    totals = {match["total"] for match in matches}
    if totals == {None}:
        return
    if len(totals) > 1:
        raise DataFileError(
            f"{paths[0].parent}: the {split} shards are of several sets: of {', '.join(sorted(str(total) for total in totals))}"
        )
    have, first = {int(match["number"]) for match in matches}, matches[0]
    if missing := [number for number in range(int(first["total"])) if number not in have]:
        begin, end = first.span("number")
        named = [first.string[:begin] + f"{number:0{end - begin}}" + first.string[end:] for number in missing[:5]]
        more = ", ..." if len(missing) > 5 else ""
        raise DataFileError(
            f"{paths[0].parent}: {len(missing)} of {int(first['total'])} {split} shards are missing: {', '.join(named)}{more}"
        )


# -- the index ----------------------------------------------------------------------------------------------------------------


class ImageIndex(Index):
    """The images that folders or shards hold, and which of them are bad."""

    def folder_images(self, root: Path) -> FolderImages:
        """The images under a folder, as they are now."""
        fields = ("root", "folders", "stamps", "folder_of", "names", "ends", "ignored")
        if self.content.get("root") == os.fspath(root) and set(fields) <= self.content.keys():
            images = FolderImages(**{name: self.content[name] for name in fields})
            if images.is_current():
                return images
        images = list_images(root)
        self.content = {name: getattr(images, name) for name in fields}
        self.save()
        return images

    def records(self, paths: list[Path], *, tolerant: bool) -> TFRecords:
        """The records of shards, as they are now; `tolerant` keeps those before a damage."""
        stamps = [[os.fspath(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
        if self.content.get("files") == stamps and {"starts", "lengths", "first"} <= self.content.keys():
            return TFRecords.at(paths, **{name: self.content[name] for name in ("starts", "lengths", "first")})
        records, self.content = TFRecords(paths, tolerant=tolerant), {}
        if records.packed:
            rank_zero_warn(f"{paths[0].parent}: packed shards are unpacked whole for every image, which is slow: unpack them")
        elif not records.damage:
            self.content = {"files": stamps, **records.places()}
            self.save()
        return records


class _Check(Dataset):
    """What is wrong with each image; "" where nothing is."""

    def __init__(self, source: FolderImages | ShardImages, numbers: Sequence[int]) -> None:
        self.source, self.numbers = source, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> str:
        number = self.numbers[place]
        try:
            decode(self.source.read(number)[0])
        except TFRecordError as error:
            return error.cause
        except OSError as error:
            return error.strerror or str(error)
        except ValueError as error:
            return str(error)
        return ""


def find_bad_images(source: FolderImages | ShardImages, index: ImageIndex, *, workers: int) -> dict[int, str]:
    """Numbers and faults of the images that cannot be used, found by decoding all of them once; the index remembers.

    Those that were bad are looked at again when their file has changed.
    """
    in_files = isinstance(source, FolderImages)
    known = index.content.get("bad")
    unclear = list(range(len(source)))
    if known is not None:
        unclear = [number for number, _, stamp in known if in_files and source.stamp(number) != stamp]
        known = [entry for entry in known if entry[0] not in unclear]
    else:
        rank_zero_info(f"Looking at {len(source):,} images for bad ones, once.")
    loader = DataLoader(_Check(source, unclear), batch_size=None, num_workers=workers if len(unclear) > 100 else 0)
    found = [[number, fault, source.stamp(number) if in_files else None] for number, fault in zip(unclear, loader, strict=True) if fault]
    bad = sorted((known or []) + found)
    if known is None or unclear:
        index.content["bad"] = bad
        index.save()
    return {number: fault for number, fault, _ in bad}


# -- the data set -------------------------------------------------------------------------------------------------------------


class ImageDataset(Dataset):
    """Images of one size with their labels: random crops and mirrored ones in training, the middle in evaluation.

    `__getitem__` draws from torch's global random stream, as any data set does; `seeded_batch` collates a whole micro-batch, whose
    randomness is a function of (seed, epoch, index).

    Args:
        source: the encoded images.
        rows: numbers of those to use.
        size: side in pixels of the images that come out.
        random: whether to crop at random, as in training.
        resize: pixels to which evaluation scales the shorter side first.
        augmentation: what is done to an image after crop and mirroring, in training.
        fast: decode large parts of JPEGs at half scale; see `training_crop`. Raises UserError where simplejpeg is not installed.
        eight_bit: give images out as they are, uint8; otherwise normalised, float32.
    """

    def __init__(
        self,
        source: FolderImages | ShardImages,
        *,
        rows: np.ndarray,
        size: int,
        resize: int,
        random: bool = False,
        augmentation: ImageAugmentation | None = None,
        fast: bool = False,
        eight_bit: bool = True,
    ) -> None:
        self.source, self.rows, self.size, self.resize = source, rows, size, resize
        self.random, self.augmentation, self.eight_bit = random, augmentation, eight_bit
        self._decode_half = half_scale_decoder() if fast else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image (3, size, size) and its label (int64, no dimensions); raises ImageError, TFRecordError or OSError."""
        word = int(torch.randint(1 << 62, (1,))) if self.random else 0
        images, labels = self._batch([index], seed=word, epoch=0)
        return images[0], labels[0]

    def seeded_batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> Any:
        """Images (B, 3, size, size) in channels_last order and labels (B,) int64; what is wrong with one of them in their place.

        An exception that a loader's worker raises would come with the worker's traceback; the data module raises the one returned here.
        """
        try:
            return self._batch(indices, seed=seed, epoch=epoch)
        except (ImageError, TFRecordError, OSError) as error:
            return error

    def _batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        pixels = torch.empty(len(indices), self.size, self.size, 3, dtype=torch.uint8)
        images, labels = pixels.permute(0, 3, 1, 2), torch.empty(len(indices), dtype=torch.int64)
        for place, index in enumerate(indices):
            row = int(self.rows[index])
            data, labels[place] = self.source.read(row)
            try:
                images[place] = self._view(data, seed=seed, epoch=epoch, index=index)
            except ValueError as error:
                raise ImageError(self.source.name(row), str(error)) from None
        return (images if self.eight_bit else normalised(images)), labels

    def _view(self, data: np.ndarray, *, seed: int, epoch: int, index: int) -> Tensor:
        if not self.random:
            return center_crop(data, size=self.size, resize=self.resize)
        generator = torch.Generator().manual_seed(mix(seed, _CROP, epoch, index))
        uniforms = torch.rand(UNIFORMS, generator=generator, dtype=torch.float64).tolist()
        image = training_crop(data, size=self.size, uniforms=uniforms, decode_half=self._decode_half)
        return self.augmentation(image, seed=seed, epoch=epoch, index=index) if self.augmentation else image


@cache
def _scale_and_shift(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (MEAN, STD))
    return 1 / (255 * std), -mean / std


def normalised(images: Tensor) -> Tensor:
    """uint8 images (B, 3, H, W) as float32 with ImageNet's mean 0 and deviation 1, in channels_last order."""
    scale, shift = _scale_and_shift(images.device)
    return images.to(torch.float32, memory_format=torch.channels_last).mul_(scale).add_(shift)


class ImageNetDataModule(pl.LightningDataModule):
    """Training, validation and test images of any size in class folders or TFRecord shards, such as ImageNet's; normalised on the device.

    A folder `data_dir` has train/ and val/ (or validation/), and perhaps test/, with a folder for each class. The training folders give the
    classes, in the order of `class_order`; folders nested in them belong to their class. The images of val/ may also lie together, beside
    ImageNet's LOC_val_solution.csv or its development kit. Shards are named train-00000-of-01024 and validation-00000-of-00128; beside
    them `convert` leaves a file with classes and counts. How images are read is said in `resnet_ipu.images`.

    Args:
        dataset: IMAGENET.
        data_dir: the folder.
        micro_batch_size: images in a training batch of the loader.
        eval_batch_size: images in a validation, test or prediction batch; null is micro_batch_size.
        num_workers: processes that load training and evaluation data.
        augment: random crops and mirrored images in training; otherwise it sees the middle, as evaluation does.
        auto_augment: after that, randaugment (two random operations) or trivialaugment (one).
        randaugment_magnitude: of randaugment's operations, 0 to 30; null is 9.
        auto_augment_fill: fills the empty areas where auto_augment shifts or rotates an image: mean (colour) or black; null is mean.
        color_jitter: then vary brightness, contrast and saturation by up to this share each.
        random_erasing: probability with which a rectangle is then filled with the mean colour.
        image_size: side of the images in pixels, as the network sees them.
        eval_image_size: the same in evaluation; null is image_size.
        eval_resize: pixels to which evaluation scales the shorter side before it takes the middle; null is 8/7 of eval_image_size.
        fast_decode: decode training JPEGs at half scale where the crop has at least twice image_size pixels each way.
        eight_bit_transfer: bring images to the device as uint8 and normalise them there, which moves a quarter of the bytes.
        on_bad_image: raise ends the run with the image's path; skip decodes all of them once before the run and leaves out the bad ones.
        classes: class names in the order of their labels; null takes the training folders, or the shards' own list.
        num_classes: of shards that say nothing about it; null is 1000.
        train_shards: how many there should be, where that is not what the names say.
        validation_shards: the same for validation.
        index_dir: folder in which lists of the images are kept for the next start; null keeps none.

    Raises:
        UserError: an option is out of range or means nothing for what is in data_dir.
        DataNotFoundError: there is no such data. DataFileError: files are missing or do not fit each other.
    """

    def __init__(
        self,
        *,
        dataset: Literal["IMAGENET"] = "IMAGENET",
        data_dir: str | Path = "data",
        micro_batch_size: int = 32,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        augment: bool = True,
        auto_augment: Literal["randaugment", "trivialaugment"] | None = None,
        randaugment_magnitude: int | None = None,
        auto_augment_fill: Literal["mean", "black"] | None = None,
        color_jitter: float | None = None,
        random_erasing: float | None = None,
        image_size: int = 224,
        eval_image_size: int | None = None,
        eval_resize: int | None = None,
        fast_decode: bool = False,
        eight_bit_transfer: bool = True,
        on_bad_image: Literal["raise", "skip"] = "raise",
        classes: list[str] | None = None,
        num_classes: int | None = None,
        train_shards: int | None = None,
        validation_shards: int | None = None,
        index_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("micro_batch_size", micro_batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("num_workers", num_workers, 0),
            ("image_size", image_size, 1),
            ("eval_image_size", eval_image_size, 1),
            ("num_classes", num_classes, 1),
            ("train_shards", train_shards, 1),
            ("validation_shards", validation_shards, 1),
        ):
            if value is not None and value < least:
                raise UserError(f"{name}={value} must be at least {least}")
        machine.check_processes(num_workers, "num_workers")
        if dataset != "IMAGENET":
            raise UserError(f"dataset={dataset!r} is unknown here: IMAGENET is")
        if on_bad_image not in ("raise", "skip"):
            raise UserError(f"on_bad_image={on_bad_image!r} is unknown: choose from raise, skip")
        single = {"auto_augment": auto_augment, "color_jitter": color_jitter, "random_erasing": random_erasing}
        single["auto_augment_fill"] = auto_augment_fill
        for name, value in {**single, "fast_decode": fast_decode or None}.items():
            if value is not None and not augment:
                raise UserError(f"{name}={value} means nothing with augment=False, which switches random crops and all after them off")
        if fast_decode:
            half_scale_decoder()
        self.dataset_name, self.in_channels, self.used_sample = dataset, 3, False
        self.data_dir = Path(data_dir).expanduser()
        self.micro_batch_size, self.eval_batch_size = micro_batch_size, eval_batch_size or micro_batch_size
        self.num_workers, self.augment, self.image_size, self.fast_decode = num_workers, augment, image_size, fast_decode
        self.eval_image_size = eval_image_size or image_size
        self.eval_resize = eval_resize or round(self.eval_image_size / EVAL_SHARE)
        if self.eval_resize < self.eval_image_size:
            raise UserError(f"eval_resize={eval_resize} must be at least the side of the middle that is taken, {self.eval_image_size}")
        self.augmentation = ImageAugmentation(**single, magnitude=randaugment_magnitude, fill=MEAN)
        self.eight_bit_transfer, self.on_bad_image = eight_bit_transfer, on_bad_image
        self.index_dir = None if index_dir is None else Path(index_dir)
        self.bad_images: dict[str, dict[int, str]] = {}  # of each split: number, fault
        self.damage: dict[str, list[str]] = {}  # of each split's shards
        self.layout = find_layout(self.data_dir, expected={"train": train_shards, "validation": validation_shards})
        for name, value in (("train_shards", train_shards), ("validation_shards", validation_shards), ("num_classes", num_classes)):
            if value is not None and not self.layout.shards:
                raise UserError(f"{name}={value} means nothing here: {self.data_dir} has folders of images, not shards")
        self._manifest = self._read_manifest()
        self.classes = list(classes) if classes else self._find_classes()  # None where shards do not name them
        if self._manifest.get("classes", self.classes) != self.classes:
            raise DataFileError(
                f"{self.layout.manifest}: its {len(self._manifest['classes'])} classes are not those that the network learns"
            )
        if self.classes is not None and num_classes not in (None, len(self.classes)):
            raise UserError(f"num_classes={num_classes}, but {self.data_dir} has {len(self.classes)} classes")
        self.num_classes = num_classes or (STANDARD_CLASSES if self.classes is None else len(self.classes))

    def _read_manifest(self) -> dict[str, Any]:
        path = self.layout.manifest
        if path is None:
            return {}
        try:
            manifest = json.loads(path.read_text())
            if manifest["records"] is None:
                raise DataFileError(f"{path.parent}: the shards are not all there: convert was interrupted; the same command finishes them")
            return {"classes": list(manifest["classes"]), "records": dict(manifest["records"])}
        except DataFileError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise DataFileError(f"{path}: not a list of shards as convert writes it ({error!r})") from None

    def _find_classes(self) -> list[str] | None:
        if (folder := self.layout.folders.get("train")) is not None:
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries if _kind(entry) == "folder" and not _is_noise(os.fsencode(entry.name))]
            above = {_identity(path) for path in (folder.resolve(), *folder.resolve().parents)}
            names = [name for name in names if _identity(folder / name) not in above]
            if not names:
                raise DataNotFoundError(f"{folder} has no class folders: give each class a folder of images there")
            for name in names:
                if not name.isprintable():  # a configuration and a checkpoint keep the names
                    raise DataFileError(f"{folder}: the class folder {os.fsencode(name)!r} has a name that is no text: rename it")
            return class_order(names)
        if self.layout.shards:
            return self._manifest.get("classes")
        raise DataNotFoundError(f"{self.data_dir} has no train/, whose folders name the classes: set classes, or give a checkpoint")

    # -- what a run may know of it

    @property
    def description(self) -> str:
        """The data in a few words, for people."""
        kinds = [f"{len(paths):,} {split} shards" for split, paths in self.layout.shards.items()]
        kinds += [f"folder {path.name}/" for path in self.layout.folders.values()]
        return f"{self.data_dir}: {', '.join(kinds)}; {self.image_size} x {self.image_size}"

    @property
    def class_summary(self) -> str:
        """How many classes there are, and which get the first labels."""
        if self.classes is None:
            return f"{self.num_classes:,}, labels as in the shards"
        first = ", ".join(f"{label} {name}" for label, name in enumerate(self.classes[:5]))
        return f"{self.num_classes:,}: {first}{', ...' if self.num_classes > 5 else ''}"

    @property
    def num_train_samples(self) -> int:
        """Training images; 0 without a training part."""
        return len(self.part("train") or ())

    @property
    def num_validation_samples(self) -> int:
        """Validation images; 0 without a validation part."""
        return len(self.part("validation") or ())

    @property
    def caveat(self) -> str | None:
        """The bad images that were left out; None where there are none."""
        lines = [f"a {split} shard is damaged: {fault}" for split, faults in self.damage.items() for fault in faults]
        for split, bad in self.bad_images.items():
            if bad:
                source = self._sources(split)
                shown = [f"  {' '.join(source.name(number).splitlines())}: {fault}" for number, fault in list(bad.items())[:20]]
                more = [f"  and {len(bad) - 20:,} more"] if len(bad) > 20 else []
                lines += [f"{len(bad):,} bad {split} images were left out:", *shown, *more]
        return "\n".join(lines) or None

    def fingerprint(self) -> str:
        """Fingerprint of the training data: the images, those left out, and their classes, but not the pixels.

        Two data modules with the same fingerprint draw the same samples in the same order for one seed; a checkpoint can keep it.
        """
        part = self.part("train")
        return fingerprint(self.classes, self.num_classes, None if part is None else [part.source.fingerprint(), part.rows])

    # -- parts

    def setup(self, stage: str | None = None) -> None:
        """Find the images that this stage needs (once); they are read from then on."""
        if stage == "test":
            _ = self._test_part
        elif stage == "predict":
            _ = self._prediction_part
        else:
            for split in ("train", "validation") if stage == "fit" else ("validation",) if stage == "validate" else FOLDERS:
                self.part(split)

    def part(self, split: str) -> ImageDataset | None:
        """The data set `train`, `validation` or `test`; None where there is no such part."""
        return self._parts(split)

    @cached_property
    def _parts(self) -> Callable[[str], ImageDataset | None]:
        return cache(self._make_part)  # of this object alone

    @cached_property
    def _sources(self) -> Callable[[str], FolderImages | ShardImages]:
        return cache(self._make_source)

    def __getstate__(self) -> dict[str, Any]:  # a process that is spawned looks again
        return {name: value for name, value in self.__dict__.items() if name not in ("_parts", "_sources")}

    def _make_part(self, split: str) -> ImageDataset | None:
        if split not in self.layout.folders | self.layout.shards:
            return None
        index, bad = self._index(split), {}
        with index.alone():
            source = self._sources(split)
            if self.on_bad_image == "skip":
                bad = find_bad_images(source, index, workers=self.num_workers)
        if self.on_bad_image == "skip":
            self.bad_images[split] = bad
            if bad:
                rank_zero_warn(
                    f"{len(bad):,} bad {split} images are left out, {len(source) - len(bad):,} are good; a list follows at the end"
                )
        rows = np.setdiff1d(np.arange(len(source)), np.array(list(bad), dtype=np.int64))
        if not len(rows):
            raise DataNotFoundError(f"{self.data_dir} has no {split} image that can be used")
        training = split == "train"
        if training and bad and isinstance(source, FolderImages):
            left = np.bincount(source.labels[rows], minlength=len(self.classes))
            if gone := [name for name, count in zip(self.classes, left.tolist(), strict=True) if not count]:
                raise DataNotFoundError(f"{source.root}: all images of {', '.join(gone[:5])} are bad: mend them, or remove the folder")
        return ImageDataset(
            source,
            rows=rows,
            size=self.image_size if training else self.eval_image_size,
            resize=round(self.image_size / EVAL_SHARE) if training else self.eval_resize,
            random=self.augment and training,
            augmentation=self.augmentation,
            fast=self.fast_decode and training,
            eight_bit=self.eight_bit_transfer,
        )

    @cached_property
    def _index(self) -> Callable[[str], ImageIndex]:
        return cache(lambda split: ImageIndex(self.index_dir, f"images-{split}", shared=self.on_bad_image == "skip"))

    def _make_source(self, split: str) -> FolderImages | ShardImages:
        if split in self.layout.shards:
            paths = self.layout.shards[split]
            records = self._index(split).records(paths, tolerant=self.on_bad_image == "skip")
            if records.damage:
                self.damage[split] = [str(fault) for fault in records.damage]
                rank_zero_warn(f"{len(records.damage):,} {split} shards are damaged, what lies before is used; a list follows at the end")
            else:
                self._check_counts(split, paths, records)
            return ShardImages(records, num_classes=self.num_classes)
        images = self._index(split).folder_images(self.layout.folders[split])
        ignored = Counter(images.ignored)
        images.labels = self._labels(split, images, ignored)
        if ignored:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(ignored.items()))
            rank_zero_warn(f"{images.root}: names that are ignored: {reasons}")
        return images

    def _labels(self, split: str, images: FolderImages, ignored: Counter) -> np.ndarray:
        """The label of each image; those outside of the class folders are taken out and counted."""
        if self.classes is None:
            raise UserError(f"{images.root} names its classes, but the shards of {self.data_dir} do not: set classes")
        if not len(images):
            raise DataNotFoundError(f"{images.root} has no images: put the {split} images there, or remove the folder")
        label_of = {name: label for label, name in enumerate(self.classes)}
        tops = [folder.split(os.sep, 1)[0] for folder in images.folders]
        counts = np.bincount(images.folder_of, minlength=len(tops))
        if not any(tops):  # all in one folder
            if split == "train":
                raise DataNotFoundError(f"{images.root} has no class folders: give each class a folder of images there")
            return np.full(len(images), -1) if split == "test" else flat_labels(images, self.classes, data_dir=self.data_dir)
        of_class = Counter()
        for top, count in zip(tops, counts.tolist(), strict=True):
            if top and top not in label_of:
                raise DataFileError(f"{images.root}/{top}: there is no class {top} among the {len(label_of)} that the network learns")
            of_class[top] += count
        empty = [name for name in (self.classes if split == "train" else dict.fromkeys(tops)) if name and not of_class[name]]
        if empty and split == "train":
            raise DataNotFoundError(
                f"{images.root}: {len(empty)} of {len(label_of)} classes have no images, so that nothing would train their outputs:"
                f" {', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}; put images into these folders, or remove them"
            )
        if empty:
            rank_zero_warn(
                f"{images.root}: {len(empty)} class folders have no images: {', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}"
            )
        labels = np.array([label_of.get(top, -1) for top in tops])[images.folder_of]
        if outside := int(counts[0]):  # of folder "", which comes first
            ignored["images outside of the class folders"] += outside
            starts = np.concatenate(([0], images.ends))
            images.folder_of, images.names = images.folder_of[outside:], images.names[starts[outside] :]
            images.ends, labels = images.ends[outside:] - starts[outside], labels[outside:]
        return labels

    def _check_counts(self, split: str, paths: list[Path], records: TFRecords) -> None:
        counts, known = records.counts(), self._manifest.get("records", {})
        for path, count in zip(paths, counts, strict=True):
            if path.name in known and known[path.name] != count:
                raise DataFileError(f"{path}: {count:,} records are there, {known[path.name]:,} should be")
        files, images = STANDARD_SHARDS.get(split, (0, 0))
        if not known and len(paths) == files and len(records) != images and self.num_classes == STANDARD_CLASSES:
            short = [path.name for path, count in zip(paths, counts, strict=True) if count < images // files]
            where = f"; with fewer than {images // files:,}: {', '.join(short[:5])}{', ...' if len(short) > 5 else ''}" if short else ""
            rank_zero_warn(f"{paths[0].parent}: {len(records):,} {split} images are there, ImageNet has {images:,}{where}")

    # -- loaders

    def train_dataloader(self) -> DataLoader:
        """Training images, shuffled; the last batch may be smaller."""
        if self.part("train") is None:
            raise DataNotFoundError(f"{self.data_dir} has no training images: neither train/ nor train-* shards")
        return self._loader(self.part("train"), batch_size=self.micro_batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader | list:
        """Validation images in order, every one of them; an empty list without validation."""
        return self._loader(self.part("validation"), batch_size=self.eval_batch_size)

    def test_dataloader(self) -> DataLoader | list:
        """Test images in order; the validation images where there are none whose class is known."""
        if self._test_part is not self.part("test"):
            rank_zero_info(f"{self.data_dir} has no test images of known class: the validation images take their place.")
        return self._loader(self._test_part, batch_size=self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader | list:
        """The test images in order, of known class or not; the validation images where there are none."""
        return self._loader(self._prediction_part, batch_size=self.eval_batch_size)

    @property
    def _test_part(self) -> ImageDataset | None:
        part = self.part("test")
        known = part is not None and not (isinstance(part.source, FolderImages) and (part.source.labels < 0).any())
        return part if known else self.part("validation")

    @property
    def _prediction_part(self) -> ImageDataset | None:
        return self.part("test") or self.part("validation")

    def write_predictions(self, probabilities: Tensor, path: Path) -> None:
        """Write a table: each image's path (in shards: its place), the likeliest class and its probability, in the order of the data."""
        part = self._prediction_part
        best, labels = (values.tolist() for values in probabilities.float().max(dim=1))
        table = io.StringIO()
        writer = csv.writer(table)
        writer.writerow(["image", "class", "probability"])
        for row, label, probability in zip(part.rows.tolist(), labels, best, strict=False):  # fewer where the run was limited
            writer.writerow([part.source.name(row), self.classes[label] if self.classes else label, f"{probability:.6f}"])
        with atomic_write(path) as file:
            file.write(table.getvalue().encode("utf-8", "surrogateescape"))

    def _loader(self, part: ImageDataset | None, *, batch_size: int, shuffle: bool = False) -> DataLoader | list:
        if part is None:
            return []
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return DataLoader(part, batch_size=batch_size, shuffle=shuffle, pin_memory=torch.cuda.is_available(), **workers)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Raise here what a loader's worker found wrong with an image."""
        if isinstance(batch, Exception):
            raise batch
        return batch

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """On the device: uint8 images (B, 3, H, W) to normalised float32 in channels_last order."""
        images, labels = batch
        return normalised(images) if images.dtype == torch.uint8 else images, labels
