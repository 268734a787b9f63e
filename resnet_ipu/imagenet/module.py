"""The data module of ImageNet and data sets laid out like it.

The order of the samples is a function of (seed, epoch), a sample's crop one of (seed, epoch, index): shards are read at random, by the
places of their records, so that both forms give the same batches. Images stay uint8 until they are on the device.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from cifar_ipu.augment import ImageAugmentation
from cifar_ipu.data import DataFileError, DataNotFoundError
from lightning_ipu import machine
from lightning_ipu.data import checks
from lightning_ipu.data.fingerprint import fingerprint
from lightning_ipu.data.tfrecord import TFRecords
from lightning_ipu.errors import UserError
from lightning_ipu.files import atomic_write
from resnet_ipu.imagenet.dataset import ImageDataset, normalised
from resnet_ipu.imagenet.folders import FolderImages, class_order, flat_labels, identity_of, is_noise, kind_of
from resnet_ipu.imagenet.images import MEAN, half_scale_decoder
from resnet_ipu.imagenet.index import ImageIndex, find_bad_images
from resnet_ipu.imagenet.layout import FOLDERS, find_layout
from resnet_ipu.imagenet.shards import ShardImages

STANDARD_SHARDS = {"train": (1024, 1_281_167), "validation": (128, 50_000)}  # files and images of ImageNet as TFRecords
STANDARD_CLASSES = 1000
EVAL_SHARE = 224 / 256  # of the scaled image that the middle crop of an evaluation shows each way


class ImageNetDataModule(pl.LightningDataModule):
    """Training, validation and test images of any size in class folders or TFRecord shards, such as ImageNet's; normalised on the device.

    A folder `data_dir` has train/ and val/ (or validation/), and perhaps test/, with a folder for each class. The training folders give the
    classes, in the order of `class_order`; folders nested in them belong to their class. The images of val/ may also lie together, beside
    ImageNet's LOC_val_solution.csv or its development kit. Shards are named train-00000-of-01024 and validation-00000-of-00128; beside
    them `convert` leaves a file with classes and counts. How images are read is said in `resnet_ipu.imagenet.images`.

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
        of_shards = {"train_shards": train_shards, "validation_shards": validation_shards, "num_classes": num_classes}
        checks.at_least(1, micro_batch_size=micro_batch_size, eval_batch_size=eval_batch_size)
        checks.at_least(0, num_workers=num_workers)
        checks.at_least(1, image_size=image_size, eval_image_size=eval_image_size, **of_shards)
        machine.check_processes(num_workers, "num_workers")
        if dataset != "IMAGENET":
            raise UserError(f"dataset={dataset!r} is unknown here: IMAGENET is")
        checks.known(("raise", "skip"), on_bad_image=on_bad_image)
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
        for name, value in of_shards.items():
            if value is not None and not self.layout.shards:
                raise UserError(f"{name}={value} means nothing here: {self.data_dir} has folders of images, not shards")
        self._settle_classes(classes, num_classes)

    def _settle_classes(self, classes: list[str] | None, num_classes: int | None) -> None:
        """The classes and their number: as given, as the shards' list has them, or as the training folders are named."""
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
                names = [entry.name for entry in entries if kind_of(entry) == "folder" and not is_noise(os.fsencode(entry.name))]
            above = {identity_of(path) for path in (folder.resolve(), *folder.resolve().parents)}
            names = [name for name in names if identity_of(folder / name) not in above]
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
