"""Where the splits of a data set lie: in folders of images, or in shards of TFRecords."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cifar_ipu.data import DataFileError, DataNotFoundError

FOLDERS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}  # names of a split's folder
MANIFEST = "shards.json"  # beside shards that `convert` wrote: classes, and how many records each file has
_SHARD = re.compile(r"(?P<split>train|validation|val|test)(?![a-z]).*?(?:(?P<number>\d+)-of-(?P<total>\d+))?(?P<suffix>\.tfrecords?)?$")


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
            path = next((root / name for name in names if (root / name).is_dir()), None)
            if path is not None and (found := _shards_in(path, split)):
                shards[split] = found
            elif path is not None:
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
