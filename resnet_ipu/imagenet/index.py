"""What an earlier start found in folders and shards, and which images are bad."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, Dataset

from lightning_ipu.data.index import Index
from lightning_ipu.data.tfrecord import TFRecordError, TFRecords
from resnet_ipu.imagenet.folders import FolderImages, list_images
from resnet_ipu.imagenet.images import decode
from resnet_ipu.imagenet.shards import ShardImages


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
