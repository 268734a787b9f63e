"""The data module of CosmoFlow: universes simulated here, or read from its TFRecord files.

Simulated universes are written as the files that the real data set consists of and read back by the same reader. Counts stay int16 until they
are on the device. Records, not files, are what is shuffled and shared out, so any number of readers can share any number of files; training
and validation never have a universe in common.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cosmoflow_ipu.data.cache import CubeCache
from cosmoflow_ipu.data.dataset import CubeDataset, DummyDataset
from cosmoflow_ipu.data.files import CHANNELS, SPLITS, CosmoDataError, find_files, read_cube, sample_size_of, universe_of
from cosmoflow_ipu.data.progress import progress
from cosmoflow_ipu.data.simulate import FIRST_INDEX, file_name, spread_of, write_universes
from cosmoflow_ipu.universe import Universes
from lightning_ipu import machine
from lightning_ipu.data import checks
from lightning_ipu.data.fingerprint import fingerprint
from lightning_ipu.data.index import Index
from lightning_ipu.data.tfrecord import TFRecordError, TFRecords
from lightning_ipu.errors import UserError
from lightning_ipu.randomness import mix, name_word

_SPLIT = name_word("universe split")


class CosmoFlowDataModule(pl.LightningDataModule):
    """Volumes of particle counts (int16) and the four parameters of their universes, each from -1 to 1 over its range.

    What a model needs to know (`input_size`, `in_channels`, `physical_spread`) is known from construction on.

    Args:
        dataset: synthetic (simulated universes), tfrecord (CosmoFlow's files in `data_dir`) or dummy (one random cube over and over).
        data_dir: folder of the TFRecord files: with sub-folders train, validation and, if there is one, test; or without, where universes
            are then held out by `validation_split`. For synthetic data: where folders of universes are made.
        micro_batch_size: cubes in a training batch of the loader.
        eval_batch_size: cubes in a validation, test or prediction batch; null is `micro_batch_size`.
        num_workers: processes that read; 0 reads in the training process.
        n_train: training cubes; null is 2,000 synthetic or dummy ones, all there are in files.
        n_valid: validation cubes, test cubes as well; null is a tenth of the training cubes, all there are in files.
        sample_size: voxels along each side of a cube; null is 32, in files whatever the cubes have.
        channels: how many of the four redshifts 0, 0.5, 1.5 and 3, from the first on.
        augment: turn and mirror every training cube into one of its 48 symmetric forms, another in each epoch.
        validation_split: share of the universes to hold out where files lie in one folder; null is 0.1.
        on_bad_record: raise ends the run with the file, record and byte; skip reads everything once before the run and leaves out what is bad.
        index_dir: folder in which skip keeps the list of what is good for the next start; null keeps none.
        cache_gb: memory in GB in which cubes are kept as int16 once they were read, for all parts and all of this machine's processes together;
            null is the size of packed files, up to half of the free memory. Other files are left to the operating system's cache.
        cells: voxels along each side of the simulated box, which is cut into cubes; null is `sample_size`.
        voxel_size: side of a simulated voxel in Mpc/h where H_0 = 70; null is 4.
        oversample: particles along each side of a simulated voxel; null is 2.
        fixed_mpc: the simulated box has one size in Mpc, as the real one has, not in Mpc/h; null is true.
        spread: simulated parameters lie within this share of 0.3, 0.8, 0.96 and 70, null is 0.3. Of files from elsewhere: what they were
            made with, if it is known, so that errors can be given in physical units.
        pack: write simulated universes with gzip.
        seed: of the simulated universes, and of those that are held out.

    Raises:
        UserError: an option that is out of range or means nothing to the data set.
        CosmoDataError: a folder without files, or with universes of other settings.
        TFRecordError: a file that is damaged or not CosmoFlow's.
    """

    def __init__(
        self,
        *,
        dataset: Literal["synthetic", "tfrecord", "dummy"] = "synthetic",
        data_dir: str | Path = "data",
        micro_batch_size: int = 8,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        n_train: int | None = None,
        n_valid: int | None = None,
        sample_size: int | None = None,
        channels: int = 4,
        augment: bool = False,
        validation_split: float | None = None,
        on_bad_record: Literal["raise", "skip"] = "raise",
        index_dir: str | Path | None = None,
        cache_gb: float | None = None,
        cells: int | None = None,
        voxel_size: float | None = None,
        oversample: int | None = None,
        fixed_mpc: bool | None = None,
        spread: float | None = None,
        pack: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        checks.known(("synthetic", "tfrecord", "dummy"), dataset=dataset)
        checks.at_least(1, micro_batch_size=micro_batch_size, eval_batch_size=eval_batch_size, n_train=n_train, sample_size=sample_size)
        checks.at_least(0, n_valid=n_valid, num_workers=num_workers, cache_gb=cache_gb)
        machine.check_processes(num_workers, "num_workers")
        if not 1 <= channels <= CHANNELS:
            raise UserError(f"channels={channels} must lie between 1 and {CHANNELS}")
        checks.known(("raise", "skip"), on_bad_record=on_bad_record)
        if validation_split is not None and not 0 < validation_split < 1:
            raise UserError(f"validation_split={validation_split} must lie between 0 and 1")
        self._refuse_what_means_nothing(
            dataset,
            synthetic={"cells": cells, "voxel_size": voxel_size, "oversample": oversample, "fixed_mpc": fixed_mpc, "pack": pack or None},
            files={"validation_split": validation_split, "on_bad_record": None if on_bad_record == "raise" else on_bad_record},
        )
        if index_dir is not None and on_bad_record == "raise":
            raise UserError(
                f"index_dir={index_dir} means nothing with on_bad_record='raise', which looks for no bad records before the run"
            )
        if dataset == "dummy" and augment:
            raise UserError("augment=True means nothing to dataset='dummy', which is one cube over and over")
        self.dataset_name, self.data_dir = dataset, Path(data_dir).expanduser()
        self.micro_batch_size, self.eval_batch_size = micro_batch_size, eval_batch_size or micro_batch_size
        self.num_workers, self.in_channels, self.augment, self.seed = num_workers, channels, augment, seed
        self.validation_split, self.on_bad_record, self.cache_gb, self.pack = validation_split or 0.1, on_bad_record, cache_gb, pack
        self.index_dir = None if index_dir is None else Path(index_dir)
        self.n_train, self.n_valid = n_train, n_valid
        self.universes: Universes | None = None
        self.physical_spread = spread
        if dataset == "tfrecord":
            self._files = find_files(self.data_dir)
            self.input_size = self._size_of_files(skipping=on_bad_record == "skip")
            if sample_size not in (None, self.input_size):
                raise UserError(f"sample_size={sample_size}, but the cubes in {self.data_dir} have {self.input_size} voxels a side")
            if spread is None:
                self.physical_spread = spread_of(self.data_dir)
            return
        self.n_train = n_train or 2000
        self.n_valid = max(1, self.n_train // 10) if n_valid is None else n_valid
        self.input_size = sample_size or 32
        if dataset == "synthetic":
            self.physical_spread = 0.3 if spread is None else spread
            self.universes = Universes(
                cells=cells or self.input_size,
                voxel_size=voxel_size or 4.0,
                oversample=oversample or 2,
                fixed_mpc=True if fixed_mpc is None else fixed_mpc,
                spread=self.physical_spread,
                seed=seed,
            )
            if self.universes.cells % self.input_size:
                raise UserError(f"cells={cells} must be a multiple of sample_size={self.input_size}")

    def _size_of_files(self, *, skipping: bool) -> int:
        """Voxels a side of the first file's cubes; where bad ones are to be skipped, of the first good file's."""
        faults = []
        for path in self._files["train"]:
            try:
                return sample_size_of(path)
            except TFRecordError as error:
                if not skipping:
                    raise
                faults.append(error)
        raise CosmoDataError(f"{self.data_dir}: no train record is good; the first fault is {faults[0]}")

    @staticmethod
    def _refuse_what_means_nothing(dataset: str, *, synthetic: dict[str, Any], files: dict[str, Any]) -> None:
        for kind, options in (("synthetic", synthetic), ("tfrecord", files)):
            for name, value in options.items():
                if value is not None and dataset != kind:
                    raise UserError(f"{name}={value} means nothing to dataset={dataset!r}; it belongs to dataset={kind!r}")

    @property
    def description(self) -> str:
        """The data in a few words, for people."""
        size = f"{self.input_size}^3 x {self.in_channels}"
        if self.universes is None:
            return f"{size} from {self.data_dir}" if self.dataset_name == "tfrecord" else f"{size}, one random cube over and over"
        family = self.universes
        box = "" if family.cells == self.input_size else f", cut from {family.cells}^3"
        return f"{size}{box} of simulated universes, voxels of {family.voxel_size:g} Mpc/h, parameters within {100 * family.spread:g} %"

    @property
    def num_train_samples(self) -> int:
        """Training cubes; files are looked through for it."""
        return self.n_train if self.dataset_name != "tfrecord" else len(self.part("train"))

    @property
    def num_validation_samples(self) -> int:
        """Validation cubes; files are looked through for it."""
        if self.dataset_name != "tfrecord":
            return self.n_valid
        return 0 if self.part("validation") is None else len(self.part("validation"))

    @property
    def folder(self) -> Path:
        """Where the TFRecord files are; of simulated universes a folder for each family and cut."""
        if self.universes is None:
            return self.data_dir
        settings = json.dumps([asdict(self.universes), self.input_size, self.pack], sort_keys=True)
        return self.data_dir / f"universes-{self.input_size}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"

    def fingerprint(self) -> str:
        """Fingerprint of the training data: the files and records, or the family of universes, without those left out or held out.

        Two data modules with the same fingerprint draw the same samples in the same order for one seed; a checkpoint can keep it. Packing does not
        change it: the cubes are the same.
        """
        if self.dataset_name == "dummy":
            return fingerprint(self.input_size, self.seed, self.n_train)
        part = self.part("train")
        source = asdict(self.universes) if self.universes is not None else part.records.fingerprint()
        return fingerprint(self.input_size, source, part.rows)

    def indices(self, splits: Iterable[str]) -> dict[str, range]:
        """Numbers of the simulated universes that the splits need: whole universes, so that none is shared."""
        cubes = (self.universes.cells // self.input_size) ** 3
        wanted = {"train": self.n_train, "validation": self.n_valid, "test": self.n_valid}
        return {split: range(FIRST_INDEX[split], FIRST_INDEX[split] - (-wanted[split] // cubes)) for split in splits}

    def prepare_data(self) -> None:
        """Simulate the universes that are missing: those for training and validation, or for the test, as the Trainer needs them."""
        if self.universes is not None:
            self._simulate(self._needed())

    def _needed(self) -> tuple[str, ...]:
        running = None if self.trainer is None else self.trainer.state.fn
        return {"fit": SPLITS[:2], "validate": SPLITS[1:2], "test": SPLITS[2:], "predict": SPLITS[2:]}.get(running, SPLITS)

    def _simulate(self, splits: Iterable[str]) -> None:
        write_universes(self.folder, self.universes, sample_size=self.input_size, indices=self.indices(splits), pack=self.pack)

    def setup(self, stage: str | None = None) -> None:
        """Find the records (once); files are read from then on."""
        for split in self._needed():
            self.part(split)

    def part(self, split: str) -> Dataset | None:
        """The data set `train`, `validation` or `test`; None where there is no such part."""
        return self._parts(split)

    @functools.cached_property
    def _parts(self) -> Callable[[str], Dataset | None]:
        return functools.cache(self._make_part)  # of this object alone

    def _make_part(self, split: str) -> Dataset | None:
        training = split == "train"
        wanted = self.n_train if training else self.n_valid
        if wanted == 0:
            return None
        if self.dataset_name == "dummy":
            return DummyDataset(samples=wanted, size=self.input_size, channels=self.in_channels, seed=self.seed)
        if self.universes is not None:
            paths = [self.folder / split / file_name(index) for index in self.indices([split])[split]]
            records = TFRecords(paths)
            rows = np.arange(wanted)
            if len(records) < wanted:
                raise CosmoDataError(
                    f"{self.folder / split} has {len(records):,} cubes in {len(paths):,} files; {wanted:,} should be there"
                )
        else:
            records, rows = self._records_of(split)
            if records is None:
                return None
            if wanted is not None:
                if wanted > len(rows):
                    option = "n_train" if training else "n_valid"
                    raise UserError(f"{option}={wanted}, but {self.data_dir} has {len(rows):,} {split} cubes")
                rows = rows[np.linspace(0, len(rows) - 1, wanted).round().astype(np.int64)]  # from all universes alike
        return CubeDataset(records=records, rows=rows, size=self.input_size, channels=self.in_channels, augment=self.augment and training)

    @cached_property
    def _cache_left(self) -> list[float]:
        """Bytes of cache that no part has taken yet, in a list of one: each process has an equal share of the machine's memory for it.

        It is computed when the first loader is made, since the number of processes is known then.
        """
        processes = 1 if self.trainer is None else max(1, self.trainer.world_size // self.trainer.num_nodes)
        return [(machine.free_memory() / 2 if self.cache_gb is None else self.cache_gb * 1e9) / processes]

    def _let_keep(self, part: CubeDataset) -> None:
        """Give a part a cache for as many cubes as fit into memory, once; files that are not packed get one only on request."""
        if part.cache is not None or self.cache_gb is None and not part.records.packed:
            return
        nbytes = self.input_size**3 * CHANNELS * 2
        capacity = min(len(part), int(self._cache_left[0] // (nbytes + 16)))
        self._cache_left[0] -= capacity * (nbytes + 16)
        part.cache = CubeCache(capacity=capacity, nbytes=nbytes) if capacity else None

    # -- files from elsewhere

    def _records_of(self, split: str) -> tuple[TFRecords | None, np.ndarray]:
        held_out_here = "validation" not in self._files and self.n_valid != 0
        if split not in self._files and not (split == "validation" and held_out_here):
            return None, np.arange(0)
        if not held_out_here:
            records, rows = self._good_records(split)
            if split == "validation":
                self._warn_of_shared_universes()
            return records, rows
        records, rows = self._good_records("train" if split == "validation" else split)
        if split == "test":
            return records, rows
        held_out = self._held_out_universes
        inside = np.array([universe_of(records.paths[records.file_of(int(row))]) in held_out for row in rows], dtype=bool)
        return records, rows[inside if split == "validation" else ~inside]

    @functools.cached_property
    def _good_records(self) -> Callable[[str], tuple[TFRecords, np.ndarray]]:
        return functools.cache(self._look_through)

    def _look_through(self, split: str) -> tuple[TFRecords, np.ndarray]:
        """A split's records and the numbers of those to use: all of them, or with on_bad_record skip those that are good."""
        paths, skipping = self._files[split], self.on_bad_record == "skip"
        with progress(f"looking through {len(paths):,} {split} files", len(paths)) as advance:
            records = TFRecords(paths, tolerant=skipping, progress=advance)
        if not skipping:
            return records, np.arange(len(records))
        stamps = [[os.fspath(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
        index = Index(self.index_dir, f"cubes-{split}", shared=True)
        with index.alone():
            if index.content.get("files") != stamps or not {"good", "bad"} <= index.content.keys():
                good, bad = self._good_of(records, split)
                index.content = {"files": stamps, "good": good, "bad": bad}
                index.save()
            good, bad = index.content["good"], index.content["bad"]
        if bad:
            shown = "; ".join(bad[:3]) + ("; ..." if len(bad) > 3 else "")
            rank_zero_warn(f"{len(bad):,} bad {split} records or files are left out, {len(good):,} records are good: {shown}")
        if not len(good):
            raise CosmoDataError(f"{self.data_dir}: no {split} record is good; the first fault is {bad[0]}")
        return records, good

    def _good_of(self, records: TFRecords, split: str) -> tuple[np.ndarray, list[str]]:
        """Read all records: the numbers of the good ones, and what is wrong with the others and with files."""
        bad, good, cube = [str(fault) for fault in records.damage], [], np.empty(self.input_size**3 * CHANNELS * 2, dtype=np.uint8)
        with progress(f"reading {len(records):,} {split} records", len(records)) as advance:
            for number in range(len(records)):
                try:
                    read_cube(records, number, cube)
                    good.append(number)
                except TFRecordError as error:
                    bad.append(str(error))
                advance(1)
        return np.array(good, dtype=np.int64), bad

    @cached_property
    def _held_out_universes(self) -> set[str]:
        universes = sorted({universe_of(path) for path in self._files["train"]})
        if len(universes) < 2:
            raise CosmoDataError(f"{self.data_dir} has the cubes of one universe, so none can be held out for validation; set n_valid to 0")
        ordered = sorted(universes, key=lambda name: mix(self.seed, _SPLIT, name_word(name)))
        return set(ordered[: min(max(1, round(self.validation_split * len(universes))), len(universes) - 1)])

    def _warn_of_shared_universes(self) -> None:
        shared = {universe_of(path) for path in self._files["train"]} & {universe_of(path) for path in self._files["validation"]}
        if shared:
            rank_zero_warn(
                f"{len(shared):,} universes have cubes both in {self.data_dir}/train and in validation ({min(shared)}, for example): the"
                " validation's score is not that of universes never seen"
            )

    def sample_counts(self) -> Tensor:
        """Counts (n, channels, size, size, size) int16 of up to 64 training cubes from all over the set, to measure their distribution."""
        part = self.part("train")
        places = np.unique(np.linspace(0, len(part) - 1, min(64, len(part))).round().astype(int))
        return torch.stack([part[int(place)][0] for place in places])

    # -- loaders

    def train_dataloader(self) -> DataLoader:
        """Training cubes, shuffled; the last batch may be smaller."""
        return self._loader(self.part("train"), batch_size=self.micro_batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader | list:
        """Validation cubes in order, every one of them; an empty list without validation."""
        return self._loader(self.part("validation"), batch_size=self.eval_batch_size)

    def test_dataloader(self) -> DataLoader | list:
        """Test cubes in order, of universes that neither training nor validation has; the validation's where files have no others."""
        part = self.part("test")
        if part is None and self.dataset_name == "tfrecord":
            rank_zero_info(f"{self.data_dir} has no test cubes: the validation cubes take their place.")
            part = self.part("validation")
        return self._loader(part, batch_size=self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader | list:
        """The test cubes, for predictions."""
        return self.test_dataloader()

    def _loader(self, part: Dataset | None, *, batch_size: int, shuffle: bool = False) -> DataLoader | list:
        if part is None:
            return []
        if isinstance(part, CubeDataset):
            self._let_keep(part)
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return DataLoader(part, batch_size=batch_size, shuffle=shuffle, pin_memory=torch.cuda.is_available(), **workers)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Raise here what a loader's worker found wrong with a record."""
        if isinstance(batch, TFRecordError):
            raise TFRecordError(*batch.__reduce__()[1])
        return batch
