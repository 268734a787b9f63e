"""Which sample comes next, with which randomness, and what a loop sees of it."""

import copy
import gc
import io
import multiprocessing
import os
import random
from typing import NamedTuple

import numpy
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BasePredictionWriter
from pytorch_lightning.loggers.logger import DummyLogger
from runs import Ledger, Net, blocks, classes, equal_states, fit, loader, make_trainer, numbered
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lightning_ipu.data.evaluation import EvaluationData
from lightning_ipu.data.host_steps import HostStep
from lightning_ipu.data.order import Share, epoch_order
from lightning_ipu.data.training import TrainingData
from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import mix


def streams() -> tuple:
    return torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(), numpy.random.get_state()[2], random.getstate()


class OddFirst(Sampler):
    """A user's own order: odd numbers, then even ones, each half shuffled by Python's and numpy's global streams."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self):
        return self.samples

    def __iter__(self):
        odd, even = list(range(1, self.samples, 2)), list(range(0, self.samples, 2))
        random.shuffle(odd)
        numpy.random.shuffle(even)
        return iter(odd + even)


# ---- Order ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(20)),
        RandomSampler(range(20), generator=torch.Generator()),
        OddFirst(20),
        SubsetRandomSampler(range(20)),
        WeightedRandomSampler(torch.ones(20), 20),
        RandomSampler(range(20), replacement=True, num_samples=30),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_an_order_is_a_function_of_seed_and_epoch_and_leaves_the_users_streams_alone(sampler):
    before = streams()
    orders = {(seed, epoch): tuple(epoch_order(sampler, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (2, 0, 1)}
    assert len(set(orders.values())) == 6
    assert streams() == before
    torch.rand(7), numpy.random.rand(7), random.random()  # what was drawn before changes nothing
    assert {place: tuple(epoch_order(sampler, seed=place[0], epoch=place[1])) for place in orders} == orders


def test_a_sampler_with_set_epoch_is_told_the_epoch():
    class ByEpoch(OddFirst):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(range(self.epoch, self.epoch + self.samples))

    assert [epoch_order(ByEpoch(3), seed=0, epoch=epoch) for epoch in (0, 4)] == [[0, 1, 2], [4, 5, 6]]


@pytest.mark.parametrize("plan", [{}, {"R": 2}, {"R": 2, "A": 2, "D": 3}], ids=str)
@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, "as it lies"),
        ({"shuffle": True}, "shuffled"),
        ({"sampler": OddFirst(24)}, "odd first"),
        ({"sampler": OddFirst(24), "num_workers": 2, "drop_last": True}, "odd first"),
    ],
    ids=["sequential", "shuffle", "custom sampler", "workers"],
)
def test_every_index_is_trained_on_once_an_epoch_in_the_users_order(plan, options, order):
    module = Ledger()
    fit(module, numbered(24, 2, **options), max_epochs=3, **plan)
    epochs = [sum(module.seen[k : k + 12], []) for k in (0, 12, 24)]

    for epoch in epochs:
        assert sorted(epoch) == list(range(24))
    if order == "as it lies":
        assert epochs == [list(range(24))] * 3
    else:
        assert len({tuple(epoch) for epoch in epochs}) == 3
    if order == "odd first":
        assert all(k % 2 for epoch in epochs for k in epoch[:12])


def test_the_order_does_not_depend_on_how_a_global_batch_is_factored():
    orders = []
    for R, A, micro_batch in ((1, 1, 8), (4, 1, 2), (2, 4, 1), (1, 8, 1)):
        module = Ledger()
        fit(module, numbered(40, micro_batch, shuffle=True), R=R, A=A, max_epochs=2)
        orders.append(sum(module.seen, []))
    assert all(order == orders[0] for order in orders)


# ---- Randomness of samples --------------------------------------------------------------------------------------------------------


class Crops(Dataset):
    """Equal images whose crop boxes are drawn with torch, numpy and Python."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), numpy.random.rand(), random.random()])


def crops(*, seed: int = 1, **options) -> list[list[float]]:
    module = Ledger()
    fit(module, DataLoader(Crops(8), batch_size=2, shuffle=True, **options), R=2, max_epochs=3, seed=seed)
    return [seen[k : k + 3] for seen in module.seen for k in (0, 3)]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_augmentation_never_repeats_between_epochs_workers_and_replicas_and_is_the_same_when_rerun(options):
    boxes = crops(**options)
    assert len(boxes) == 24
    for numbers in zip(*boxes, strict=True):  # torch's, numpy's and Python's: 24 different ones each
        assert len(set(numbers)) == 24
    assert boxes == crops(**options) == crops()
    assert not {tuple(box) for box in boxes} & {tuple(box) for box in crops(seed=2)}


def noisy_collate(samples):
    return [values + torch.rand(()) + random.random() if values.is_floating_point() else values for values in default_collate(samples)]


def test_a_random_collate_fn_draws_the_same_in_every_worker_and_run():
    runs = []
    for workers, warm_up in ((0, 0), (0, 5), (2, 0)):
        torch.rand(warm_up)
        module = Net()
        fit(module, loader(classes(24), 4, shuffle=True, num_workers=workers, collate_fn=noisy_collate), max_epochs=2)
        runs.append(module)
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert len(set(runs[0].losses)) == 12


class Batched(Dataset):
    """Draws whole micro-batches by itself."""

    def __init__(self) -> None:
        self.asked = []

    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise AssertionError("asked for a single sample")

    def seeded_batch(self, indices, *, seed, epoch):
        self.asked.append((indices, seed, epoch))
        return torch.tensor(indices, dtype=torch.float32)


TENSORS = TensorDataset(torch.rand(30, 1, 2), torch.arange(30), torch.rand(30, dtype=torch.float64))


@pytest.mark.parametrize(
    "dataset",
    [
        TENSORS,
        Subset(Subset(TENSORS, range(1, 30, 2)), [14, 0, 3, 3, -1, 7, 8, 2]),
        Subset(TENSORS, numpy.arange(9, 29)),
        Subset(TENSORS, torch.arange(9, 29)),
    ],
    ids=["whole", "subset of a subset", "numpy indices", "tensor indices"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_micro_batches_of_tensors_are_what_the_default_collation_makes(dataset, workers):
    data = TrainingData(DataLoader(dataset, batch_size=4, num_workers=workers), seed=0, share=Share(places=range(1), per_update=1))
    ours, theirs = list(data.epoch(0, first=0, last=2)), list(DataLoader(dataset, batch_size=4))[:2]
    for batch, expected in zip(ours, theirs, strict=True):
        assert type(batch) is type(expected)
        assert [tensor.dtype for tensor in batch] == [tensor.dtype for tensor in expected]
        assert all(torch.equal(tensor, other) for tensor, other in zip(batch, expected, strict=True))


def test_a_data_set_that_draws_micro_batches_is_asked_for_them_with_seed_and_epoch():
    class Validated(Ledger):
        def validation_step(self, batch, batch_idx):
            self.log("mean", batch.mean())

    training, validation = Batched(), Batched()
    trainer = fit(
        Validated(),
        DataLoader(training, batch_size=2),
        DataLoader(validation, batch_size=3),
        R=2,
        max_epochs=2,
        seed=7,
        num_sanity_val_steps=0,
    )
    batches = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert training.asked == [(batch, 7, epoch) for epoch in (0, 1) for batch in batches]
    assert validation.asked == [(batch, 7, 0) for batch in ([0, 1, 2], [3, 4, 5], [6, 7])] * 2
    assert trainer.callback_metrics["mean"].item() == 3.5


def test_the_users_random_streams_are_as_they_were_after_every_host_step_and_after_the_fit():
    seen = []

    class Watch(DummyLogger):  # called outside of hooks, which have streams of their own
        def log_metrics(self, metrics, step=None):
            seen.append(streams())

    class Drawing(Net):
        def training_step(self, batch, batch_idx):
            numpy.random.rand(), random.random()
            self.log("drawn", torch.rand(()))
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_):
            torch.rand(3), numpy.random.rand(), random.random()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            torch.rand(3)
            return batch

        def validation_step(self, batch, batch_idx):
            torch.rand(3), numpy.random.rand(), random.random()

    class Augmented(Crops):
        def __getitem__(self, index):
            return super().__getitem__(index), 0, index

    module = Drawing(lambda: blocks(width=3, dropout=0.5))
    module.once_per_host_step = True
    trainer = make_trainer(D=2, R=2, max_epochs=2, logger=Watch(), log_every_n_steps=1)
    torch.manual_seed(11), numpy.random.seed(12), random.seed(13)
    before = streams()
    loaders = DataLoader(Augmented(8), batch_size=1, shuffle=True), DataLoader(Augmented(8), batch_size=2, shuffle=True)
    trainer.fit(module, *loaders)
    assert len(seen) >= 2 * 4  # weight updates
    assert all(one == before for one in seen)
    assert streams() == before
    trainer.validate(module, loaders[1], verbose=False)
    assert streams() == before


def test_mix_is_a_good_hash():
    words = [mix(seed, epoch, index) for seed in range(4) for epoch in range(4) for index in range(64)]
    assert len(set(words)) == len(words) and all(0 <= word < 2**63 for word in words)
    assert mix(1, 2) != mix(2, 1) and mix(0) != mix(0, 0)
    low = sum(word & 1 for word in words) / len(words)
    assert 0.45 < low < 0.55


# ---- Loaders that are refused -----------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Numbers 0, 1, ..., of no known length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        for k in range(worker.id if worker else 0, self.samples, worker.num_workers if worker else 1):
            yield torch.tensor(float(k))


class SizedStream(Stream):
    def __len__(self):
        return self.samples


class OwnLoader(DataLoader):
    def __iter__(self):
        yield from ()


class NoLength(Sampler):
    def __iter__(self):
        return iter(range(4))


DATA = TensorDataset(torch.ones(16))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2, False)), "batch_sampler=BatchSampler"),
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (DataLoader(Stream(8), batch_size=None), "batch_size=None"),
        (OwnLoader(DATA, batch_size=2), "OwnLoader"),
        (DataLoader(DATA, batch_size=2, sampler=NoLength()), "NoLength has no length"),
        ([torch.ones(2), torch.ones(2)], "DataLoader"),
        ([DataLoader(DATA), DataLoader(DATA)], "several training loaders \\(2 in a"),
        ({"a": DataLoader(DATA), "b": DataLoader(DATA)}, "several training loaders \\(2 in a"),
        (pl.utilities.CombinedLoader([DataLoader(DATA), DataLoader(DATA)]), "several training loaders \\(2 in a"),
    ],
    ids=["batch_sampler", "batch_size None", "stream batch_size None", "own iteration", "no length", "list", "two", "dict", "combined"],
)
def test_a_loader_whose_batches_the_strategy_cannot_own_is_refused_before_the_first_step(train, message):
    module = Ledger()
    with pytest.raises(PlanError, match=message) as refusal:
        fit(module, train)
    assert "\n" not in str(refusal.value) and not module.seen


def test_a_sampler_that_gives_fewer_than_it_promised_is_an_error():
    class Liar(OddFirst):
        def __len__(self):
            return 30

    with pytest.raises(PlanError, match="Liar gave 24 samples"):
        fit(Ledger(), numbered(24, 2, sampler=Liar(24)))


# ---- Streams ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Stream, SizedStream])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=str)
def test_a_stream_trains_whole_updates_in_its_own_order(kind, options):
    module = Ledger()
    trainer = fit(module, DataLoader(kind(11), batch_size=2, **options), A=2, D=8, max_epochs=2)
    assert module.seen == [[0, 1], [2, 3], [4, 5], [6, 7]] * 2
    assert trainer.global_step == 4 and module.w.item() == -2 * (1.5 + 5.5)


def test_a_sized_stream_that_ends_early_is_an_error():
    class Short(SizedStream):
        def __len__(self):
            return 20

    with pytest.raises(PlanError, match="ended before the 10 micro-batches"):
        fit(Ledger(), DataLoader(Short(11), batch_size=2), D=8)


@pytest.mark.parametrize(("interval", "validated"), [(1, 6), (2, 3), (3, 2)])
def test_a_stream_is_validated_every_so_many_weight_updates_from_its_first_epoch_on(interval, validated):
    class Validated(Ledger):
        at = 0

        def validation_step(self, batch, batch_idx):
            self.at += 1

    module = Validated()
    fit(module, DataLoader(Stream(24), batch_size=1), numbered(1), A=4, val_check_interval=interval, num_sanity_val_steps=0)
    assert module.at == validated


def test_a_limit_gives_a_stream_without_length_its_epochs():
    class Scheduled(Ledger):
        def configure_optimizers(self):
            self.updates = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Scheduled()
    trainer = fit(module, DataLoader(Stream(1 << 40), batch_size=2), A=2, D=4, limit_train_batches=7, max_epochs=2)
    assert module.seen == [[2 * k, 2 * k + 1] for k in range(6)] * 2 and trainer.global_step == module.updates == 6
    assert trainer.limit_train_batches == 7
    assert fit(Ledger(), DataLoader(Stream(1 << 40)), A=3, fast_dev_run=2).global_step == 2

    with pytest.raises(PlanError, match="limit_train_batches=0.5 needs a data set with a length.* give a number of micro-batches"):
        fit(Ledger(), DataLoader(Stream(8)), limit_train_batches=0.5)
    with pytest.raises(PlanError, match="limit_train_batches=1 leaves 1 micro-batches of a stream"):
        fit(Ledger(), DataLoader(Stream(8)), A=2, limit_train_batches=1)


@pytest.mark.parametrize("D", [1, 16])
@pytest.mark.parametrize("options", [{}, {"check_val_every_n_epoch": 2}, {"val_check_interval": 3}, {"max_steps": 12}], ids=str)
def test_a_stream_shorter_than_its_limit_ends_its_epochs_as_one_whose_limit_is_its_length(options, D):
    """Stock Lightning, too, ends the epoch, but learns too late that it does: it neither validates nor steps the schedules of epochs."""

    class Noting(Ledger):
        def __init__(self):
            super().__init__()
            self.noted = []

        def validation_step(self, batch, batch_idx):
            self.noted.append(("validated", self.current_epoch, self.global_step))

        def on_train_epoch_end(self):
            self.noted.append(("ended", self.current_epoch, self.global_step, self.optimizers().param_groups[0]["lr"]))

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def run(**more):
        module = Noting()
        fit(module, DataLoader(Stream(8)), numbered(1), **{"max_epochs": 3, "num_sanity_val_steps": 0, **options, **more})
        return module.noted, module.seen, module.w.item()

    assert run(D=D, limit_train_batches=20) == run(stock=True, limit_train_batches=8)


@pytest.mark.parametrize(("samples", "workers"), [(9, 0), (8, 0), (9, 1)])
def test_a_stream_shorter_than_its_limit_trains_whole_updates_and_says_what_is_left_out(samples, workers, caplog):
    module = Ledger()
    with caplog.at_level("INFO", logger="pytorch_lightning.utilities.rank_zero"):
        trainer = fit(module, DataLoader(Stream(samples), num_workers=workers), A=2, D=3, limit_train_batches=20, max_epochs=2)
    assert module.seen == [[k] for k in range(8)] * 2 and (trainer.global_step, trainer.current_epoch) == (8, 2)
    said = [message for message in caplog.messages if "The stream ended" in message]
    assert said == [
        "The stream ended in epoch 0 after 4 of the 10 weight updates that limit_train_batches asks for:"
        f" {samples - 8} samples were left out."
    ]
    with pytest.raises(PlanError, match="the training stream gave 1 samples, fewer than one weight update needs"):
        fit(Ledger(), DataLoader(Stream(1), num_workers=workers), A=2, limit_train_batches=20)


@pytest.mark.parametrize(("kind", "workers"), [(Stream, 0), (Stream, 1), (SizedStream, 1), (SizedStream, 2)])
def test_the_samples_that_a_stream_has_over_are_said(kind, workers, caplog):
    """19 samples in micro-batches of 2, A = 2: four updates and 3 over; two workers have 10 and 9, so five and four micro-batches."""
    module = Ledger()
    with caplog.at_level("INFO", logger="pytorch_lightning.utilities.rank_zero"):
        trainer = fit(module, DataLoader(kind(19), batch_size=2, num_workers=workers), A=2, D=8, max_epochs=2)
    said = [message for message in caplog.messages if "left out of" in message]
    assert trainer.global_step == 8 and len(said) == 1 and said[0].startswith("3 samples") and "4 whole weight updates" in said[0]
    assert ("SizedStream is not known in advance" in caplog.text) == (workers == 2)


def test_a_stream_too_short_for_one_update_is_an_error():
    for workers in (0, 2):
        with pytest.raises(PlanError, match="stream gave 7 samples, fewer than one weight update needs: micro-batch 2 x .*factor 4"):
            fit(Ledger(), DataLoader(Stream(7), batch_size=2, num_workers=workers), A=4)


# ---- What hooks see ---------------------------------------------------------------------------------------------------------------


class Record(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Sample(dict):
    """A batch of the user's own."""


def first_tensor(batch):
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch


@pytest.mark.parametrize("plan", [{}, {"A": 2}, {"R": 2, "A": 2, "D": 3}, {"D": 3, "drawing": True}], ids=str)
def test_hooks_get_the_first_micro_batch_as_it_is_and_its_number_and_outputs(plan):
    """Whatever the batch is made of; every other micro-batch is trained on as well, once."""
    plan = dict(plan)
    drawing, per_update = plan.pop("drawing", False), plan.get("A", 1) * plan.get("R", 1)
    updates = plan.get("D", 1)

    class Look(pl.Callback):
        once_per_host_step = True

        def __init__(self):
            self.seen, self.counts = [], []

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            copied = copy.deepcopy(batch)
            assert type(copied) is type(batch) is not HostStep
            self.seen.append((batch_idx, copied))

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            torch.save(batch, io.BytesIO())
            before = self.seen[-1]
            assert before[0] == batch_idx and torch.equal(first_tensor(batch), first_tensor(before[1]))
            assert torch.equal(outputs["seen"], first_tensor(batch))
            progress = trainer.strategy.progress
            self.counts.append((progress.step_updates, progress.step_micro_batches, progress.step_samples))

    class Any(Ledger):
        def training_step(self, batch, batch_idx):
            self.seen.append((batch_idx, first_tensor(batch).tolist()))
            return {"loss": self.w * 1.0, "seen": first_tensor(batch)}

        def on_after_batch_transfer(self, batch, dataloader_idx):
            if drawing:
                torch.rand(1)
            return batch

    for collate in (
        torch.stack,
        lambda x: [torch.stack(x), 1],
        lambda x: {"x": torch.stack(x)},
        lambda x: Record(torch.stack(x), torch.stack(x)),
        lambda x: Sample(x=torch.stack(x)),
        lambda x: [[torch.stack(x), {"z": "name"}]],
    ):
        module, look = Any(), Look()
        data = TensorDataset(torch.arange(24.0))
        fit(module, DataLoader(data, batch_size=2, collate_fn=lambda rows, c=collate: c([x for (x,) in rows])), callbacks=look, **plan)
        assert module.seen == [(k, [2 * k, 2 * k + 1]) for k in range(12)]
        assert [number for number, _ in look.seen] == list(range(0, 12, per_update * updates))
        assert all(first_tensor(batch).tolist() == [2 * number, 2 * number + 1] for number, batch in look.seen)
        assert look.counts == [(updates, per_update * updates, 2 * per_update * updates)] * (12 // per_update // updates)


def test_a_hook_may_change_the_batch_only_where_it_is_the_only_one():
    class Doubling(pl.Callback):
        once_per_host_step = True

        def __init__(self, change):
            self.change = change

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.change(batch)

    def replaced(batch):
        batch[0] = batch[0] * 2

    class Named(Ledger):
        def training_step(self, batch, batch_idx):
            return super().training_step(first_tensor(batch), batch_idx)

    def named(rows):
        return Sample({0: torch.stack([x for (x,) in rows])})

    refusal = "on_train_batch_start of Doubling changes the batch, which is one of the 2 .*on_after_batch"

    def unseen(batch):  # which leaves the tensor's version
        batch[0].data.mul_(2)

    def by_numpy(batch):
        numpy.multiply(batch[0].numpy(), 2, out=batch[0].numpy())

    in_place = [(change, {}) for change in (lambda batch: batch[0].mul_(2), unseen, by_numpy)]
    for change, options in (*in_place, (replaced, {}), (replaced, {"collate_fn": named})):
        module, data = Named(), numbered(4, **options)
        fit(module, data, callbacks=Doubling(change))
        assert module.w.item() == -2 * (0 + 1 + 2 + 3)
        for plan in ({"A": 2}, {"R": 2}, {"D": 2}):
            with pytest.raises(PlanError, match=refusal):
                fit(Named(), data, callbacks=Doubling(change), **plan)


def test_a_micro_batch_of_none_is_an_error():
    with pytest.raises(PlanError, match="collate_fn of the training loader gave None"):
        fit(Ledger(), DataLoader(TensorDataset(torch.arange(4.0)), collate_fn=lambda rows: None if rows[0][0] == 3 else rows[0][0]), A=2)


def test_a_host_step_gives_its_micro_batches_one_at_a_time():
    drawn = []
    host_step = HostStep(lambda number: drawn.append(number) or number, 2)
    assert drawn == [] and host_step.first() == 0 and drawn == [0]
    assert [host_step.take() for _ in range(3)] == [0, 1, 2] == drawn and host_step.drawn == 3


# ---- Workers ----------------------------------------------------------------------------------------------------------------------


class Opened(Dataset):
    """Must be opened in each worker, as a file would be."""

    handle = None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info().dataset is self
        return torch.tensor(float(index == self.handle))


def opened(worker):
    torch.utils.data.get_worker_info().dataset.handle = 3


def test_a_worker_init_fn_reaches_the_users_data_set():
    class Validated(Ledger):
        def validation_step(self, batch, batch_idx):
            self.log("value", batch.mean())

    data = DataLoader(Opened(), batch_size=2, num_workers=1, worker_init_fn=opened)
    module = Validated()
    trainer = fit(module, data, data, A=2, num_sanity_val_steps=0)
    assert module.seen == [[0, 0], [0, 1], [0, 0], [0, 0]] and trainer.callback_metrics["value"] == 1 / 8


# ---- Evaluation -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [{}, {"R": 4, "A": 2, "D": 8}], ids=str)
@pytest.mark.parametrize(
    ("batch", "options"),
    [
        *((batch, {"drop_last": last}) for batch in (1, 10, 64, 103, 200) for last in (False, True)),
        (10, {"shuffle": True}),
        (40, {"num_workers": 2}),
    ],
    ids=str,
)
def test_every_sample_is_scored_once_and_the_value_depends_on_nothing(plan, options, batch):
    module, samples = Net(), classes(103)
    trainer = make_trainer(**plan)
    scores = loader(samples, batch, **options)
    expected = torch.nn.functional.cross_entropy(module(samples.tensors[0]), samples.tensors[1]).item()

    for run in (trainer.validate, trainer.test):
        (metrics,) = run(module, scores, verbose=False)
        assert metrics["val_loss"] == pytest.approx(expected, rel=1e-6)
        assert metrics["val_accuracy"] == pytest.approx(
            float((module(samples.tensors[0]).argmax(1) == samples.tensors[1]).double().mean()), abs=1e-12
        )
    predicted = torch.cat(trainer.predict(module, scores)).tolist()
    assert sorted(predicted) == list(range(103))
    assert options.get("shuffle") or predicted == list(range(103))


def test_predictions_come_with_the_indices_of_their_samples():
    class Writer(BasePredictionWriter):
        seen = []

        def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            self.seen.append((prediction.tolist(), batch_indices))

    writer = Writer("batch")
    make_trainer(callbacks=writer).predict(Net(), loader(classes(7), 3), return_predictions=False)
    assert writer.seen == [([0, 1, 2], [0, 1, 2]), ([3, 4, 5], [3, 4, 5]), ([6], [6])]


def test_a_custom_batch_sampler_and_a_sampler_without_length_are_welcome_in_evaluation():
    samples, module = classes(10), Net()
    expected = make_trainer().validate(module, loader(samples, 10), verbose=False)[0]["val_loss"]

    class All(Sampler):
        def __iter__(self):
            return iter(range(10))

    for scores in (
        DataLoader(samples, batch_sampler=BatchSampler(range(10), 3, drop_last=False)),
        DataLoader(samples, batch_sampler=[[0], [1, 2, 3, 4, 5, 6], [7, 8, 9]]),
        DataLoader(samples, batch_size=4, sampler=All()),
    ):
        (metrics,) = make_trainer().validate(module, scores, verbose=False)
        assert metrics["val_loss"] == pytest.approx(expected, rel=1e-6)


def test_evaluation_draws_the_same_randomness_each_time():
    class Noisy(Net):
        def validation_step(self, batch, batch_idx):
            self.log("noise", torch.rand(()) + numpy.random.rand() + random.random() + batch.sum())

    module, values = Noisy(), []
    for workers in (0, 0, 2):
        torch.rand(3)
        (metrics,) = make_trainer(R=1 + workers).validate(module, DataLoader(Crops(9), batch_size=2, num_workers=workers), verbose=False)
        values.append(metrics["noise"])
    assert len(set(values)) == 1


# ---- Resources --------------------------------------------------------------------------------------------------------------------


class Large(Dataset):
    """Samples of 4 MB each."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((1 << 20,), float(index))


def peak_of(run) -> int:
    """Bytes by which a run raises the resident memory of this process at its highest."""

    def field(name: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest value starts anew
    before = field("VmRSS")
    run()
    return field("VmHWM") - before


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc to measure peak memory")
def test_peak_memory_does_not_grow_with_accumulation_replicas_or_device_iterations():
    def run(**plan):
        module = Ledger()
        module.training_step = lambda batch, batch_idx: module.w * batch.mean()
        fit(module, DataLoader(Large(), batch_size=1), **plan)

    run()
    plans = [{}, {"A": 32}, {"R": 32}, {"D": 32}, {"R": 2, "A": 4, "D": 4}]
    peaks = [peak_of(lambda plan=plan: run(**plan)) for plan in plans]
    assert max(peaks) < 40 << 20, peaks  # all samples are 128 MB


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("options", [{"max_epochs": 2}, {"max_steps": 1, "max_epochs": -1}], ids=str)
def test_no_worker_outlives_a_fit(persistent, options):
    before = set(multiprocessing.active_children())
    workers = {"num_workers": 2, "persistent_workers": persistent}
    trainer = fit(Net(), loader(classes(32), 2, **workers), loader(classes(32), 2, **workers), D=4, num_sanity_val_steps=0, **options)
    assert trainer.global_step > 0
    assert set(multiprocessing.active_children()) <= before


def test_a_training_data_set_knows_its_micro_batches():
    data = TrainingData(numbered(11, 2), seed=0, share=Share(places=range(1), per_update=1))
    assert (data.micro_batch_size, data.samples, data.micro_batches, data.is_stream) == (2, 11, 5, False)
    assert [batch[0].tolist() for batch in data.epoch(0, first=2, last=4)] == [[4, 5], [6, 7]]
    odd = TrainingData(numbered(16, 2), seed=0, share=Share(places=range(1, 2), per_update=2))
    assert [batch[0].tolist() for batch in odd.epoch(0, first=2, last=8)] == [[6, 7], [10, 11], [14, 15]]
    stream = TrainingData(DataLoader(Stream(11), batch_size=2), seed=0, share=Share(places=range(1), per_update=1))
    assert (stream.samples, stream.micro_batches, stream.is_stream) == (None, None, True)
    assert [batch.tolist() for batch in stream.epoch(0, first=3, last=None)] == [[6, 7], [8, 9]]


def test_a_seed_is_taken_from_torch_where_lightning_was_given_none(monkeypatch):
    runs = []
    for seed in (3, 3, 4):
        trainer = make_trainer()
        monkeypatch.delenv("PL_GLOBAL_SEED")
        torch.manual_seed(seed)
        module = Net()
        torch.manual_seed(seed)
        trainer.fit(module, loader(classes(16), shuffle=True))
        runs.append(module)
    assert equal_states(runs[0], runs[1]) and runs[0].seen != runs[2].seen


def test_a_share_of_an_evaluation_that_is_less_than_a_batch_is_refused():
    with pytest.raises(PlanError, match=r"0\.1 of the 5 batches"):
        EvaluationData(numbered(10, 2), seed=0, limit=0.1, count=2)
    assert len(EvaluationData(numbered(10, 2), seed=0, limit=0.6, count=2)) == 2
