"""Image files in folders: their names, classes and labels."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from cifar_ipu.data import DataFileError, DataNotFoundError
from lightning_ipu.data.fingerprint import fingerprint

EXTENSIONS = frozenset(b"jpg jpeg jpe jfif png webp bmp dib gif tif tiff ppm pgm pbm pnm".split())
SYSTEM_NAMES = frozenset(
    (b"thumbs.db", b"ehthumbs.db", b"desktop.ini", b"icon\r", b"__macosx", b"@eadir", b"$recycle.bin", b"lost+found")
    + (b"system volume information",)
)


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


def is_noise(name: bytes) -> bool:
    return name.startswith(b".") or name.lower() in SYSTEM_NAMES


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
    above = {identity_of(folder) for folder in (root.resolve(), *root.resolve().parents)}

    def visit(folder: str, seen: set[tuple[int, int]]) -> None:
        path = os.path.join(root, folder)
        number, below = len(folders), []
        folders.append(folder)
        stamps.append(os.stat(path).st_mtime_ns)
        with os.scandir(os.fsencode(path)) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            kind = kind_of(entry)
            if is_noise(entry.name):
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
            if (identity := identity_of(os.path.join(root, inside))) in met:
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


def identity_of(path: str | os.PathLike[str]) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def kind_of(entry: os.DirEntry) -> Literal["folder", "file", "link", "other"]:
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
