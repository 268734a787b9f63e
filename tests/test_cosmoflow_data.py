"""CosmoFlow's data: files and their faults, splits by universe, symmetries, cache, readers, every sample once."""

import gzip
import json
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from forked import launched
from runs import fit, make_trainer

from cosmoflow_ipu.data import (
    CosmoDataError,
    CosmoFlowDataModule,
    CubeDataset,
    turn,
    universe_of,
    write_universes,
)
from cosmoflow_ipu.data import module as cosmoflow_data
from cosmoflow_ipu.module import CosmoFlowModule
from cosmoflow_ipu.universe import Universes
from lightning_ipu import machine
from lightning_ipu.data.tf_example import encode_example
from lightning_ipu.data.tfrecord import TFRecordError, TFRecords, write_tfrecord

TINY = {"sample_size": 8, "voxel_size": 8.0, "oversample": 1, "n_train": 6, "n_valid": 3}


def example(number: int, *, size: int = 4, targets=None) -> bytes:
    """A record of CosmoFlow's form whose counts all are `number`."""
    counts = np.full(size**3 * 4, number, dtype="<i2")
    targets = np.full(4, number / 1000) if targets is None else np.asarray(targets)
    return encode_example({"x": counts.tobytes(), "y": targets.astype(np.float32)})


def write_split(folder: Path, files: dict[str, list[int]], **options) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in files.items():
        write_tfrecord(folder / f"{name}.tfrecord", [example(number) for number in numbers], **options)


@pytest.fixture
def folder(tmp_path):
    """A data set of two splits, 7 validation cubes in one file."""
    write_split(tmp_path / "train", {f"univ_ics_a{k}_{part:03d}": [10 * k + part] for k in range(4) for part in range(3)})
    write_split(tmp_path / "validation", {"univ_ics_a90": list(range(100, 107))})
    return tmp_path


def files_module(folder: Path, **options) -> CosmoFlowDataModule:
    return CosmoFlowDataModule(**{"dataset": "tfrecord", "data_dir": folder, **options})


def numbers(part: CubeDataset) -> list[int]:
    """The numbers that `example` put into a part's cubes."""
    return [int(part[index][0].float().mean()) for index in range(len(part))]


class Seen(pl.LightningModule):
    """Notes which cubes came, and learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.trained, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.trained += batch[0].float().mean((1, 2, 3, 4)).int().tolist()
        return self.w * batch[1].sum()

    def validation_step(self, batch, batch_idx):
        self.validated += batch[0].float().mean((1, 2, 3, 4)).int().tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


# -- layout -------------------------------------------------------------------------------------------------------------------


def test_channels_are_permuted_to_the_front_not_reshaped(tmp_path):
    record = encode_example({"x": np.arange(32, dtype="<i2").tobytes(), "y": np.zeros(4)})
    write_tfrecord(tmp_path / "x.tfrecord", [record])
    dataset = CubeDataset(records=TFRecords([tmp_path / "x.tfrecord"]), rows=np.arange(1), size=2, channels=4, augment=False)
    counts, _ = dataset[0]
    assert counts.dtype == torch.int16 and counts.shape == (4, 2, 2, 2)
    assert [channel.flatten().tolist() for channel in counts] == [list(range(first, 32, 4)) for first in range(4)]
    batch, _ = dataset.seeded_batch([0, 0], seed=0, epoch=0)
    assert torch.equal(batch[1], counts) and batch.is_contiguous(memory_format=torch.channels_last_3d)
    dataset.channels = 2
    assert torch.equal(dataset[0][0], counts[:2])


def test_the_48_symmetries_are_distinct_move_all_channels_alike_and_number_0_is_the_identity():
    cube = np.random.default_rng(0).integers(0, 99, (3, 3, 3, 4)).astype("<i2")
    forms = []
    for symmetry in range(48):
        turned = np.empty_like(cube)
        turn(cube, symmetry, into=turned)
        forms.append(turned)
        voxels = {tuple(voxel) for voxel in turned.reshape(-1, 4)}
        assert voxels == {tuple(voxel) for voxel in cube.reshape(-1, 4)} and (turned[1, 1, 1] == cube[1, 1, 1]).all()
    assert (forms[0] == cube).all() and len({form.tobytes() for form in forms}) == 48


def test_symmetries_are_drawn_by_seed_epoch_and_index_and_in_training_alone(folder):
    data = files_module(folder, augment=True)
    train = data.part("train")
    rng = np.random.default_rng(1)
    varied = rng.integers(0, 99, 256).astype("<i2").tobytes()
    write_tfrecord(folder / "train" / "univ_ics_a0_000.tfrecord", [encode_example({"x": varied, "y": np.zeros(4)})])
    assert not data.part("validation").augment
    draws = [train.seeded_batch([0], seed=seed, epoch=epoch)[0] for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0), (0, 2))]
    assert torch.equal(draws[0], draws[1]) and len({draw.numpy().tobytes() for draw in draws}) >= 3
    alone, together = train.seeded_batch([0], seed=3, epoch=4)[0], train.seeded_batch([5, 0, 1], seed=3, epoch=4)[0]
    assert torch.equal(alone[0], together[1])


# -- faults -------------------------------------------------------------------------------------------------------------------

GOOD = example(1)


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (encode_example({"x": bytes(512), "z": np.zeros(4)}), "feature 'y' is missing; there are x, z"),
        (encode_example({"x": bytes(510), "y": np.zeros(4)}), "feature 'x' has 510 bytes, not 512"),
        (encode_example({"x": bytes(512), "y": np.zeros(2)}), "feature 'y' must be 4 floats, not 2 values of float32"),
        (example(1, targets=[0, 0, 1.5, 0]), r"feature 'y' must lie between -1 and 1, not \[0.0, 0.0, 1.5, 0.0\]"),
        (example(1, targets=[0, np.nan, 0, 0]), r"feature 'y' has values that are not finite: \[0.0, nan, 0.0, 0.0\]"),
        (example(-5), "feature 'x' has a count of -5: these are no particle counts in int16"),
        (GOOD[:-3], "runs past the end"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_record_ends_training_in_one_line_with_file_record_byte_and_cause(folder, record, cause, workers):
    write_tfrecord(folder / "train" / "univ_ics_a3_002.tfrecord", [GOOD, record])
    data = files_module(folder, num_workers=workers, micro_batch_size=1)
    expected = rf"univ_ics_a3_002\.tfrecord: record 1 at byte {len(GOOD) + 16}: .*{cause}$"
    with pytest.raises(TFRecordError, match=expected) as caught:
        fit(Seen(), data, limit_val_batches=0)
    assert "\n" not in str(caught.value)


def test_files_that_are_cut_off_or_foreign_are_found_before_training(folder):
    path = folder / "train" / "univ_ics_a1_000.tfrecord"
    whole = path.read_bytes()
    for damaged, cause in ((whole[:-1], "cut off"), (gzip.compress(whole)[:-9], "cut off"), (b"<html>", "a web page"), (b"", "empty")):
        path.write_bytes(damaged)
        module = Seen()
        with pytest.raises(TFRecordError, match=rf"univ_ics_a1_000\.tfrecord: .*{cause}"):
            fit(module, files_module(folder))
        assert module.trained == []


def test_skipping_leaves_out_what_is_bad_says_so_and_keeps_all_that_is_good(folder):
    train = folder / "train"
    (train / "univ_ics_a0_000.tfrecord").write_bytes(b"<html>")
    write_tfrecord(train / "univ_ics_a0_001.tfrecord", [example(1), example(-1), example(50)])
    flipped = bytearray((train / "univ_ics_a0_002.tfrecord").read_bytes())
    flipped[200] ^= 1
    (train / "univ_ics_a0_002.tfrecord").write_bytes(flipped)
    (train / "univ_ics_a1_000.tfrecord").write_bytes((train / "univ_ics_a1_000.tfrecord").read_bytes() + b"tail")
    data = files_module(folder, on_bad_record="skip")
    with pytest.warns(UserWarning, match="4 bad train records or files are left out, 11 records are good: .*a0_000.tfrecord"):
        part = data.part("train")
    assert sorted(numbers(part)) == sorted([1, 50] + [10 * k + part for k in range(1, 4) for part in range(3)])
    for path in train.iterdir():
        path.write_bytes(b"<html>")
    with pytest.raises(CosmoDataError, match="no train record is good; the first fault is .*a0_000.tfrecord"):
        files_module(folder, on_bad_record="skip")


@pytest.mark.parametrize("keeps", [True, False], ids=["index_dir", "no index_dir"])
def test_one_process_of_a_run_looks_for_bad_records_and_the_next_start_knows_what_it_found(folder, tmp_path, keeps):
    path = folder / "train" / "univ_ics_a0_001.tfrecord"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    looks = folder / "looks"

    def start() -> int:
        read = cosmoflow_data.read_cube

        def noted(*arguments):
            with looks.open("a") as file:
                file.write("x")
            time.sleep(0.02)
            return read(*arguments)

        cosmoflow_data.read_cube = noted
        data = files_module(folder, on_bad_record="skip", index_dir=folder / "out" if keeps else None)
        with pytest.warns(UserWarning, match="1 bad train records or files are left out, 11 records are good: .*a0_001.tfrecord"):
            return data.num_train_samples

    assert launched(3, start, temporary=tmp_path / "tmp") == 3 * [11] and looks.read_text() == 12 * "x"
    assert not list((tmp_path / "tmp").iterdir())  # nothing is left elsewhere
    (folder / "train" / "univ_ics_a0_002.tfrecord").write_bytes(path.read_bytes())  # another data set
    with pytest.warns(UserWarning, match="2 bad train records or files are left out, 10 records are good"):
        assert files_module(folder, on_bad_record="skip", index_dir=folder / "out" if keeps else None).num_train_samples == 10


def test_missing_folders_and_wrong_sizes_are_said(tmp_path, folder):
    with pytest.raises(CosmoDataError, match="nowhere is not there; give the folder that holds train/"):
        files_module(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CosmoDataError, match=r"empty has no \.tfrecord files"):
        files_module(tmp_path / "empty")
    with pytest.raises(ValueError, match="sample_size=8, but the cubes in .* have 4 voxels a side"):
        files_module(folder, sample_size=8)
    with pytest.raises(ValueError, match="n_train=13, but .* has 12 train cubes"):
        files_module(folder, n_train=13).part("train")
    write_tfrecord(folder / "train" / "a.tfrecord", [encode_example({"x": bytes(100), "y": np.zeros(4)})])
    with pytest.raises(TFRecordError, match=r"a\.tfrecord: record 0 at byte 0: feature 'x' has .* no cube of 4 int16 counts"):
        files_module(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "cifar"}, "dataset='cifar' is unknown"),
        ({"n_train": 0}, "n_train=0 must be at least 1"),
        ({"channels": 5}, "channels=5 must lie between 1 and 4"),
        ({"on_bad_record": "ignore"}, "on_bad_record='ignore' is unknown"),
        ({"on_bad_record": "skip"}, "on_bad_record=skip means nothing to dataset='synthetic'"),
        ({"dataset": "dummy", "oversample": 2}, "oversample=2 means nothing to dataset='dummy'"),
        ({"dataset": "dummy", "augment": True}, "augment=True means nothing to dataset='dummy'"),
        ({"cells": 48}, "cells=48 must be a multiple of sample_size=32"),
        ({"spread": 0.7}, "spread=0.7 must lie between 0 and 0.5"),
        ({"validation_split": 1.0}, "validation_split=1.0 must lie between 0 and 1"),
    ],
)
def test_options_that_cannot_be_are_said_with_their_value(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CosmoFlowDataModule(**options)


# -- splits -------------------------------------------------------------------------------------------------------------------


def test_one_folder_is_split_by_universe_never_by_cube(tmp_path):
    write_split(tmp_path, {f"univ_a{k}_{part:03d}": [10 * k + part] for k in range(10) for part in range(4)})
    data = files_module(tmp_path, validation_split=0.3, seed=1)
    train, validation = ({number // 10 for number in numbers(data.part(split))} for split in ("train", "validation"))
    assert len(data.part("train")) == 28 and len(data.part("validation")) == 12
    assert train.isdisjoint(validation) and train | validation == set(range(10))
    other = files_module(tmp_path, validation_split=0.3, seed=2).part("validation")
    assert {number // 10 for number in numbers(other)} != validation


def test_without_validation_no_universe_is_held_out_also_where_there_is_only_one(tmp_path):
    write_split(tmp_path / "many", {f"univ_a{k}": [k] for k in range(10)})
    write_split(tmp_path / "one", {f"univ_a_{part:03d}": [part] for part in range(3)})
    for name, count in (("many", 10), ("one", 3)):
        data = files_module(tmp_path / name, n_valid=0)
        assert numbers(data.part("train")) == list(range(count)) and data.part("validation") is None and data.val_dataloader() == []


def test_given_folders_that_share_a_universe_are_warned_of(folder):
    shutil.copy(folder / "train" / "univ_ics_a2_000.tfrecord", folder / "validation" / "univ_ics_a2_063.tfrecord")
    with pytest.warns(UserWarning, match="1 universes have cubes both in .*univ_ics_a2, for example"):
        files_module(folder).part("validation")
    assert universe_of("d/univ_ics_2019-03_a123_045.tfrecord") == "univ_ics_2019-03_a123"
    assert universe_of("universe-0000123.tfrecord") == "universe-0000123" and universe_of("a_001.tfrecord.gz") == "a"


def test_a_cap_takes_cubes_from_all_over_and_hidden_files_are_passed_over(folder):
    (folder / "train" / "._univ_ics_a0_000.tfrecord").write_bytes(b"of a Mac")
    (folder / "train" / "notes.txt").write_text("notes")
    part = files_module(folder, n_train=4, n_valid=2).part("train")
    assert len(part) == 4 and len({number // 10 for number in numbers(part)}) == 4


# -- readers ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_seven_cubes_are_validated_once_each_whatever_the_plan_and_training_announces_what_it_leaves_out(folder, workers, caplog):
    module, data = Seen(), files_module(folder, num_workers=workers, micro_batch_size=3)
    with caplog.at_level("INFO"):
        trainer = fit(module, data, R=4, num_sanity_val_steps=0)
    assert sorted(module.validated) == list(range(100, 107))
    assert sorted(module.trained) == [10 * k + part for k in range(4) for part in range(3)] and trainer.global_step == 1
    with pytest.raises(ValueError, match="12 samples, fewer than one weight update needs: micro-batch 5 .* replication_factor 4"):
        fit(Seen(), files_module(folder, micro_batch_size=5), R=4)
    module = Seen()
    fit(module, files_module(folder, micro_batch_size=1, n_train=10), R=4, limit_val_batches=0)
    assert len(module.trained) == 8


@pytest.mark.parametrize(("processes", "nodes"), [(1, 1), (2, 1), (6, 3)])
def test_all_parts_and_processes_of_a_machine_together_keep_at_most_half_of_what_is_free(tmp_path, monkeypatch, processes, nodes):
    cube = 512 + 16
    write_split(tmp_path / "train", {f"{name}_000": [1] for name in "abcdefgh"}, pack=True)
    write_split(tmp_path / "validation", {f"{name}_000": [1] for name in "ijkl"}, pack=True)
    for options in ({}, {"cache_gb": 10 * cube / 1e9}):
        monkeypatch.setattr(machine, "free_memory", lambda: 20 * cube)
        data = files_module(tmp_path, **options)
        assert data.num_train_samples == 8  # looked through before the run, when nobody knows the processes
        data.trainer = SimpleNamespace(world_size=processes, num_nodes=nodes, state=SimpleNamespace(fn="fit"))
        taken = [data.val_dataloader().dataset.cache, data.train_dataloader().dataset.cache]
        monkeypatch.setattr(machine, "free_memory", lambda: 1000 * cube)  # some of it was asked for once
        taken.append(data.train_dataloader().dataset.cache)
        assert taken[1] is taken[2]
        here = 10 // (processes // nodes)
        assert [cache.capacity for cache in taken[:2] if cache is not None] == ([4, 6] if here == 10 else [4, 1])


@pytest.mark.parametrize("pack", [False, True])
def test_one_file_serves_more_readers_than_it_has_records(tmp_path, pack):
    write_split(tmp_path / "train", {"a": [1, 2, 3, 4, 5, 6, 7, 8]}, pack=pack)
    write_split(tmp_path / "validation", {"b": [100]}, pack=pack)
    module = Seen()
    fit(module, files_module(tmp_path, num_workers=4, micro_batch_size=1), R=4, max_epochs=2, num_sanity_val_steps=0)
    assert sorted(module.trained) == sorted([1, 2, 3, 4, 5, 6, 7, 8] * 2) and module.validated == [100, 100]


def test_workers_and_cache_change_no_bit_of_a_run(folder):
    runs = []
    for options in ({}, {"num_workers": 2}, {"cache_gb": 1.0}, {"num_workers": 2, "cache_gb": 1.0}, {"cache_gb": 4e-6}):
        module = Seen()
        fit(module, files_module(folder, micro_batch_size=2, augment=True, **options), R=2, max_epochs=3, num_sanity_val_steps=0)
        runs.append((module.trained, module.validated))
    assert all(run == runs[0] for run in runs) and len(runs[0][0]) == 36


def test_cubes_are_kept_as_int16_up_to_the_limit_and_then_not_read_again(folder):
    assert files_module(folder, cache_gb=0).train_dataloader().dataset.cache is None
    assert files_module(folder).train_dataloader().dataset.cache is None  # the system keeps what is not packed
    data = files_module(folder, cache_gb=10 * (512 + 16) / 1e9)
    part = data.train_dataloader().dataset
    assert part.cache.capacity == 10 and part.cache.nbytes == 512
    first = part.seeded_batch(list(range(12)), seed=0, epoch=0)
    for path in (folder / "train").iterdir():
        path.unlink()
    again = part.seeded_batch(list(range(10)), seed=0, epoch=0)
    assert torch.equal(again[0], first[0][:10]) and torch.equal(again[1], first[1][:10])
    with pytest.raises(FileNotFoundError):
        part[10]


def test_packed_files_are_cached_by_themselves_and_workers_share_the_cache(tmp_path):
    write_split(tmp_path / "train", {"a_000": [1], "b_000": [2]}, pack=True)
    data = files_module(tmp_path, num_workers=2, micro_batch_size=1)
    loader, part = data.train_dataloader(), data.part("train")
    assert part.cache.capacity == 1 and data.val_dataloader().dataset.cache.capacity == 1
    list(loader)
    assert part.cache.get(0, np.empty(512, np.uint8)) is not None  # filled by a worker, seen here


# -- simulated universes ------------------------------------------------------------------------------------------------------


def test_simulated_universes_are_written_once_as_tfrecords_and_read_back(tmp_path):
    data = CosmoFlowDataModule(data_dir=tmp_path, cells=16, **TINY)
    data.prepare_data()
    files = sorted(str(path.relative_to(data.folder)) for path in data.folder.rglob("*.tfrecord"))
    assert files == ["test/universe-2000000.tfrecord", "train/universe-0000000.tfrecord", "validation/universe-1000000.tfrecord"]
    counts, targets = data.part("train").seeded_batch(range(6), seed=0, epoch=0)
    box = data.universes.counts(0)
    assert torch.equal(counts[1].permute(1, 2, 3, 0), box[:8, :8, 8:]) and torch.equal(counts[4].permute(1, 2, 3, 0), box[8:, :8, :8])
    assert np.array_equal(targets.numpy(), np.tile(data.universes.targets(0), (6, 1)))
    assert len(data.part("validation")) == 3 and len(data.part("test")) == 3

    before = {path: path.stat().st_mtime_ns for path in data.folder.rglob("*.tfrecord")}
    more = CosmoFlowDataModule(data_dir=tmp_path, cells=16, **{**TINY, "n_train": 9})
    more.prepare_data()
    assert more.folder == data.folder and len(list(data.folder.glob("train/*.tfrecord"))) == 2
    assert all(path.stat().st_mtime_ns == written for path, written in before.items())
    assert CosmoFlowDataModule(data_dir=tmp_path, cells=16, **{**TINY, "seed": 1}).folder != data.folder
    found = files_module(data.folder)
    assert found.physical_spread == 0.3 and found.input_size == 8


def test_any_number_of_workers_writes_the_same_bytes_and_an_interrupted_run_is_finished(tmp_path):
    universes, indices = Universes(cells=8, voxel_size=8.0), {"train": range(12), "validation": range(1_000_000, 1_000_002)}
    for name, workers in (("one", 0), ("three", 3)):
        write_universes(tmp_path / name, universes, sample_size=8, indices=indices, workers=workers)
    one, three = ({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.tfrecord")} for name in ("one", "three"))
    assert one == three and len(one) == 14
    for lost in (3, 7):
        (tmp_path / "one" / "train" / f"universe-{lost:07d}.tfrecord").unlink()
    (tmp_path / "one" / "train" / ".universe-0000003.tfrecord.x.part").write_bytes(b"half")  # as a kill leaves it
    write_universes(tmp_path / "one", universes, sample_size=8, indices=indices)
    assert {path.name: path.read_bytes() for path in (tmp_path / "one").rglob("*.tfrecord")} == three
    assert not list((tmp_path / "one" / "train").glob(".*"))
    with pytest.raises(CosmoDataError, match=r"one holds universes of seed 0, not 5: choose another folder"):
        write_universes(tmp_path / "one", Universes(cells=8, voxel_size=8.0, seed=5), sample_size=8, indices=indices)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CosmoDataError, match="cannot write simulated universes to"):
        CosmoFlowDataModule(data_dir=tmp_path, **TINY).prepare_data()


def test_a_file_where_the_folder_should_be_is_named(tmp_path):
    (tmp_path / "data").write_text("")
    with pytest.raises(CosmoDataError, match="cannot write simulated universes to .*data/universes-8"):
        CosmoFlowDataModule(data_dir=tmp_path / "data", **TINY).prepare_data()


def test_a_fit_simulates_training_and_validation_and_a_test_its_own_universes(tmp_path):
    data = CosmoFlowDataModule(data_dir=tmp_path, micro_batch_size=2, **TINY)
    module = Seen()
    fit(module, data)
    assert {path.parent.name for path in data.folder.rglob("*.tfrecord")} == {"train", "validation"}
    module.test_step = module.validation_step
    make_trainer().test(module, CosmoFlowDataModule(data_dir=tmp_path, **TINY), verbose=False)
    assert len(list((data.folder / "test").iterdir())) == 3


def test_the_dummy_set_is_one_cube_over_and_over_and_reads_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = CosmoFlowDataModule(dataset="dummy", n_train=5, n_valid=2, sample_size=8, channels=2)
    data.prepare_data()
    counts, targets = data.part("train").seeded_batch([0, 4], seed=0, epoch=3)
    assert counts.shape == (2, 2, 8, 8, 8) and torch.equal(counts[0], counts[1]) and torch.equal(targets[0], targets[1])
    assert counts.dtype == torch.int16 and targets.abs().max() <= 1 and len(data.part("train")) == 5 and not list(tmp_path.iterdir())


# -- real galaxies ------------------------------------------------------------------------------------------------------------


def test_galaxies_of_an_sdss_mock_go_through_files_and_prediction(tmp_path):
    galaxies = np.load(Path(__file__).parent / "data" / "galaxies_sdss_mr19_64.npy")
    assert galaxies.shape == (64, 64, 64) and galaxies.sum() == 1_235_904
    counts = np.repeat(galaxies.astype("<i2")[..., None], 4, axis=-1)  # one redshift in place of four
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        write_tfrecord(tmp_path / split / "mr19_000.tfrecord", [encode_example({"x": counts.tobytes(), "y": np.zeros(4)})], pack=True)
    data = files_module(tmp_path, channels=1, n_valid=None, spread=0.1)
    module = CosmoFlowModule(
        network="cosmoflow", input_size=data.input_size, in_channels=1, physical_spread=data.physical_spread, predict_units="physical"
    )
    (predicted,) = make_trainer().predict(module, data)
    module.eval()
    with torch.no_grad():
        expected = module.network(torch.from_numpy(galaxies.astype(np.float32)).log1p()[None, None])
    torch.testing.assert_close(predicted, torch.tensor([0.3, 0.8, 0.96, 70.0]) * (1 + 0.1 * expected), rtol=1e-4, atol=1e-4)


def test_the_settings_of_a_folder_of_universes_say_what_they_are(tmp_path):
    write_universes(tmp_path, Universes(cells=8, voxel_size=8.0, spread=0.2), sample_size=4, indices={"train": range(1)})
    settings = json.loads((tmp_path / "universes.json").read_text())
    assert settings["spread"] == 0.2 and settings["sample_size"] == 4 and settings["redshifts"] == [0, 0.5, 1.5, 3]
    assert settings["parameters"] == ["omega_m", "sigma_8", "n_s", "h_0"]
    (tmp_path / "universes.json").write_text("{")
    with pytest.raises(CosmoDataError, match=r"universes\.json cannot be read"):
        write_universes(tmp_path, Universes(cells=8, voxel_size=8.0), sample_size=4, indices={"train": range(2)})
