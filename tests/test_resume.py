"""A run that goes on from any checkpoint equals the run that never stopped: weights, optimizer, rates, validations and every row logged.

Which hooks are called again, and with what, is compared call by call in test_continuation.py.
"""

import enum
import os
import warnings
from functools import partial

import numpy
import pytest
import torch
from pytorch_lightning import Callback, LightningDataModule, seed_everything
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from runs import Ledger, Net, blocks, classes, equal_states, fit, loader, make_trainer, numbered
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import Dataset, IterableDataset, Sampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_ipu.command.output import MetricsFile
from lightning_ipu.data.attributes import OPAQUE, attribute_fingerprints
from lightning_ipu.plan import PlanError
from lightning_ipu.recipe.schedules import build_schedule

HOOKS = {
    "on_train_batch_start": "exact",
    "on_train_epoch_start": "exact",
    "on_train_batch_end": "",
    "on_validation_batch_start": "exact",
    "on_validation_end": "",
    "on_train_epoch_end": "",
}


class Saver(Callback):
    """Saves in every hook there is, and notes what the run did: validations, epochs' ends."""

    def __init__(self, folder=None) -> None:
        self.folder, self.done, self.saves = folder, [], []

    def setup(self, trainer, module, stage):
        for hook in HOOKS:
            setattr(self, hook, partial(self._hook, hook))

    def _hook(self, hook, trainer, module, *batch, **more) -> None:
        if trainer.sanity_checking:
            return
        if hook in ("on_validation_end", "on_train_epoch_end"):
            self.done.append((hook, trainer.global_step, trainer.current_epoch))
        if self.folder is not None:
            name = self.folder / f"{len(self.saves)}.ckpt"
            trainer.save_checkpoint(name)
            self.saves.append((name, hook, trainer.global_step, len(self.done)))


class Measured(Net):
    """Logs per step and per epoch, and a metric with a state over the epoch."""

    def __init__(self) -> None:
        schedule = lambda m, o: {"scheduler": lr_scheduler.ExponentialLR(o, 0.9), "interval": "step"}  # noqa: E731
        super().__init__(partial(blocks, norm=True, dropout=0.3), schedule=schedule)
        self.metric = MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.seen.append(index.tolist())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.metric(logits, y)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss


def run(folder, *, save=None, ckpt_path=None, resumed=None, data=53, **options):
    """A fit of three epochs of 6 updates; returns module, trainer, what the callback noted and the text of metrics.csv."""
    module, saver = Measured(), Saver(save)
    logger = MetricsFile(folder)
    if resumed is not None:
        logger.go_on_after(resumed)
    plan = {"R": 2, "A": 2, "log_every_n_steps": 4, "num_sanity_val_steps": 0, "max_epochs": 3, **options}
    training, validation = loader(classes(data), 2, shuffle=True, num_workers=plan.pop("workers", 0)), loader(classes(7, seed=6), 2)
    trainer = fit(module, training, validation, ckpt_path=ckpt_path, callbacks=saver, logger=logger, **plan)
    return module, trainer, saver, (folder / "metrics.csv").read_text()


def optimizer_state(trainer):
    return [{name: value.tolist() for name, value in state.items()} for state in trainer.optimizers[0].state.values()]


@pytest.mark.parametrize(
    "options",
    [
        {"D": 4, "val_check_interval": 0.25, "max_steps": 16, "max_epochs": None},
        {"D": 3, "check_val_every_n_epoch": None, "val_check_interval": 4, "workers": 2},
    ],
    ids=str,
)
def test_resuming_from_a_checkpoint_of_any_hook_under_another_d_gives_the_uninterrupted_run(options, tmp_path):
    (tmp_path / "saves").mkdir()
    whole, trainer, noted, rows = run(tmp_path / "whole", save=tmp_path / "saves", **options)
    state = optimizer_state(trainer)
    places = {}
    for save in noted.saves:  # of the many, one of each kind of place
        places.setdefault((save[1], min(save[2] % 6, 3)), save)
    for name, hook, step, noted_by_then in places.values():
        text = (tmp_path / "whole" / "metrics.csv").read_text()
        folder = tmp_path / f"{name.stem}-{hook}"
        folder.mkdir()
        (folder / "metrics.csv").write_text(text)  # with rows of what comes after
        stands = torch.load(name, weights_only=True)["lightning_ipu"]["position"]
        resumed, again, told, resumed_rows = run(folder, ckpt_path=name, resumed=stands["run_updates"], **{**options, "D": 5, "workers": 0})
        place = f"{hook} after update {step}"
        assert whole.seen[4 * step :] == resumed.seen and whole.rates[step:] == resumed.rates, place
        assert equal_states(whole, resumed) and optimizer_state(again) == state, place
        assert again.global_step == trainer.global_step, place
        assert again.current_epoch == trainer.current_epoch or step == trainer.max_steps, place
        if HOOKS[hook] == "exact":
            assert told.done == noted.done[noted_by_then:], place
        assert resumed_rows == rows, place


def test_a_run_that_is_stopped_twice_within_one_validation_keeps_its_epochs_averages(tmp_path):
    plan, place = {"D": 3, "check_val_every_n_epoch": None, "val_check_interval": 4, "max_epochs": 1}, None
    whole = run(tmp_path / "whole", **plan)[1]
    for folder in ("first", "second"):
        (tmp_path / folder / "saves").mkdir(parents=True)
        saves = run(tmp_path / folder, save=tmp_path / folder / "saves", ckpt_path=place, **plan)[2].saves
        place = next(path for path, hook, *_ in saves if hook == "on_validation_batch_start")
    again = run(tmp_path / "third", ckpt_path=place, **plan)[1]
    assert again.callback_metrics == whole.callback_metrics and "loss_epoch" in whole.callback_metrics


@pytest.mark.parametrize(
    "callback", [lambda path: OnExceptionCheckpoint(path, "error"), lambda path: ModelCheckpoint(path, "error", save_on_exception=True)]
)
def test_a_checkpoint_on_an_error_within_an_update_holds_what_was_before_it(callback, tmp_path):
    class Failing(Measured):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 18:
                raise RuntimeError("a bad sample")
            return loss

    whole, plan = Measured(), {"A": 4, "D": 3, "max_epochs": 1}
    trainer = fit(whole, loader(classes(53), 2), **plan)
    with pytest.raises(RuntimeError):  # in the second update of the second host step
        fit(Failing(), loader(classes(53), 2), callbacks=callback(tmp_path), enable_checkpointing=True, **plan)
    second = Measured()
    again = fit(second, loader(classes(53), 2), ckpt_path=tmp_path / "error.ckpt", **plan)
    assert len(second.seen) == 24 - 16 and equal_states(second, whole)
    assert again.callback_metrics == trainer.callback_metrics  # averages and a metric over the whole epoch


@pytest.mark.parametrize("hook", ["on_before_zero_grad", "lr_scheduler_step"])
def test_a_checkpoint_on_an_error_between_two_updates_holds_the_statistics_of_the_one_before_it(hook, tmp_path):
    class Failing(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler.StepLR(optimizer, 1), "interval": "step"}}

        def lr_scheduler_step(self, *_):
            if hook == "lr_scheduler_step" and len(self.seen) == 2 * 4:
                raise RuntimeError("a bad rate")

        def on_before_zero_grad(self, optimizer):
            if hook == "on_before_zero_grad" and len(self.seen) == 2 * 4:
                raise RuntimeError("a bad gradient")

    keep = OnExceptionCheckpoint(tmp_path, "error")
    with pytest.raises(RuntimeError, match="a bad"):
        fit(Failing(lambda: blocks(norm=True)), loader(classes(53), 2), callbacks=keep, enable_checkpointing=True, A=4, D=3)
    saved = torch.load(tmp_path / "error.ckpt", weights_only=True)
    assert saved["global_step"] == 2 and saved["lightning_ipu"]["position"]["rest_of_step"] == 1
    counters = [value.item() for name, value in saved["state_dict"].items() if name.endswith("num_batches_tracked")]
    assert counters and set(counters) == {2 * 4}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"A": 4}, r"replication_factor x gradient_accumulation_factor is 8, but .* trained with 4"),
        ({"seed": 2}, "the seed is 2, but .* trained with 1"),
        ({"precision": "bf16-mixed"}, "precision is bf16-mixed, but .* trained with 32-true"),
        ({"data": 21}, "the training set has 21 samples, but that of the run to be resumed had 53"),
        ({"limit_train_batches": 10}, "stands after weight update 4 of its epoch, which now has 2"),
    ],
    ids=str,
)
def test_a_run_is_not_resumed_under_other_numbers(changed, words, tmp_path):
    (tmp_path / "saves").mkdir()
    noted = run(tmp_path / "whole", save=tmp_path / "saves", D=4)[2]
    name = next(name for name, _, step, _ in noted.saves if step == 4)
    with pytest.raises(PlanError, match=words):
        run(tmp_path / "second", ckpt_path=name, **changed)


def test_two_interruptions_at_epochs_ends_give_the_uninterrupted_order_with_any_number_of_workers(tmp_path):
    def orders(*, epochs, workers=0, resume=None):
        module = Net()
        trainer = fit(module, loader(classes(8), 1, shuffle=True, num_workers=workers), max_epochs=epochs, ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module.seen

    whole = orders(epochs=3)
    assert whole[:8] != whole[8:16]
    assert orders(epochs=1, workers=2) == whole[:8]
    assert orders(epochs=2, resume=tmp_path / "1.ckpt") == whole[8:16]
    assert orders(epochs=3, workers=2, resume=tmp_path / "2.ckpt") == whole[16:]


def test_the_ledger_of_a_run_that_was_resumed_within_an_epoch_counts_every_sample_once(tmp_path):
    def ledger(*, data, resume=None, **options):
        keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
        module = Ledger()
        fit(module, data, ckpt_path=resume, callbacks=keep, enable_checkpointing=True, **options)
        return module

    ledger(data=numbered(6))
    assert ledger(data=numbered(6), resume=tmp_path / "step=3.ckpt").seen == [[3.0], [4.0], [5.0]]
    ledger(data=loader(8), A=4)  # a checkpoint stands between weight updates: there is no half window to lose
    assert ledger(data=loader(8), A=4, resume=tmp_path / "step=1.ckpt").w.item() == -2.0


@pytest.mark.parametrize("extended_after", [5, 3])
def test_extending_a_run_does_not_raise_the_learning_rate(extended_after, tmp_path):
    def rates(*, epochs, steps=-1, resume=None):
        schedule = lambda module, optimizer: {  # noqa: E731
            "scheduler": build_schedule(optimizer, "cosine", total=module.trainer.max_epochs * 5, warmup_fraction=0.0, final_fraction=0.0),
            "interval": "step",
        }
        module = Net(schedule=schedule)
        trainer = fit(module, loader(classes(10), 2), max_epochs=epochs, max_steps=steps, ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return module.rates

    first = rates(epochs=1, steps=extended_after)
    more = rates(epochs=2, resume=tmp_path / "a.ckpt")
    assert len(first) + len(more) == 10
    together = first + more
    assert all(late <= early for early, late in zip(together, together[1:], strict=False))
    if extended_after == 5:
        assert more == [0.0] * 5  # the schedule was over


def test_a_run_that_was_given_no_seed_goes_on_with_its_own_and_names_one_that_can_be_given(tmp_path, monkeypatch):
    def order(*, epochs, own, given=None, resume=None):
        module, trainer = Net(), make_trainer(max_epochs=epochs)
        torch.manual_seed(own)  # what a new process does at random
        monkeypatch.delenv("PL_GLOBAL_SEED")
        if given is not None:
            seed_everything(given, verbose=False)
        trainer.fit(module, loader(classes(8), 8, shuffle=True), ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module.seen

    whole, large = order(epochs=2, own=1 << 40 | 11), 1 << 40 | 11
    order(epochs=1, own=large)
    kept = torch.load(tmp_path / "1.ckpt")["lightning_ipu"]["numbers"]["seed"]
    assert order(epochs=2, own=5, resume=tmp_path / "1.ckpt") == order(epochs=2, own=5, given=kept, resume=tmp_path / "1.ckpt") == whole[1:]
    with pytest.raises(PlanError, match=f"the seed is 7, but .* give {kept}"):
        order(epochs=2, own=5, given=7, resume=tmp_path / "1.ckpt")


class Drawing(Dataset):
    """Draws from a generator that each loader worker makes from its own seed."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.tensor(float(Drawing.generator.integers(1000)))

    @staticmethod
    def init(worker):
        Drawing.generator = numpy.random.default_rng(torch.initial_seed())


def test_loader_workers_of_a_resumed_epoch_have_the_seeds_of_that_epoch(tmp_path):
    def draws(*, epochs, resume=None):
        module = Ledger()
        module.validation_step = lambda batch, batch_idx: scored.append(batch.item())
        scored = []
        data = partial(loader, Drawing(), num_workers=1, worker_init_fn=Drawing.init)
        trainer = fit(module, data(), data(), max_epochs=epochs, ckpt_path=resume, num_sanity_val_steps=0)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module.seen, scored

    seen, scored = draws(epochs=2)
    assert seen[:3] != seen[3:] and scored[:3] == scored[3:]  # a validation is the same each time
    draws(epochs=1)
    assert draws(epochs=2, resume=tmp_path / "1.ckpt") == (seen[3:], scored[3:])


class Rotating(Sampler):
    """Begins one further in every epoch, by its own count."""

    def __init__(self, has_state=False) -> None:
        self.count = 0
        if has_state:
            self.state_dict, self.load_state_dict = lambda: {"count": self.count}, lambda state: vars(self).update(state)

    def __len__(self):
        return 4

    def __iter__(self):
        self.count += 1
        return iter([(self.count + number) % 4 for number in range(4)])


class Counting(IterableDataset):
    """A stream that tells its epochs apart by its own count."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self):
        self.count += 1
        return iter(torch.arange(4.0) + 10 * self.count)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class CountingAlone(IterableDataset):
    """The same without a state that could be kept."""

    def __init__(self) -> None:
        self.count = 0

    __iter__ = Counting.__iter__


class Continuing(IterableDataset):
    """Goes on in each epoch where the last one ended, by a generator."""

    def __init__(self) -> None:
        self.numbers = (torch.tensor(float(number)) for number in range(1000))

    def __iter__(self):
        return self.numbers


class Batches(Callback):
    """Notes the batches that a hook gets after the one in which checkpoints are written."""

    def __init__(self, seen) -> None:
        self.seen = seen

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(batch.item())


@pytest.mark.parametrize("kind", [CountingAlone, Continuing])
def test_a_stream_with_a_state_that_cannot_be_kept_is_read_through_the_past_epochs(kind, tmp_path):
    class Keep(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if resume is None:
                trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    def run():
        module, batches = Ledger(), []
        fit(module, loader(kind()), callbacks=[Keep(), Batches(batches)], limit_train_batches=4, max_epochs=3, ckpt_path=resume)
        return module.seen, batches

    resume = None
    seen, batches = run()
    counted = [10.0 * epoch + number for epoch in (1, 2, 3) for number in range(4)]
    assert batches == (counted if kind is CountingAlone else list(range(12))) and seen == [[number] for number in batches]
    for step in (1, 4, 6, 8, 11):
        resume = tmp_path / f"{step}.ckpt"
        assert run() == (seen[step:], batches[step - 1 :]), step


@pytest.mark.parametrize("kind", ["advanced", "kept", "stream"])
def test_a_sampler_or_stream_with_a_state_of_its_own_goes_on_in_it(kind, tmp_path):
    data = {
        "advanced": lambda: numbered(4, sampler=Rotating()),
        "kept": lambda: numbered(4, sampler=Rotating(has_state=True)),
        "stream": lambda: loader(Counting()),
    }[kind]
    keep = partial(ModelCheckpoint, tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
    whole = Ledger()
    fit(whole, data(), callbacks=keep(), enable_checkpointing=True, max_epochs=3)
    assert whole.seen[4] == ([2.0] if kind != "stream" else [20.0])
    for step in (3, 4, 7, 8):
        second = Ledger()
        fit(second, data(), ckpt_path=tmp_path / f"step={step}.ckpt", max_epochs=3)
        assert second.seen == whole.seen[step:], step


class Meter:
    def __init__(self):
        self.total = 0.0


class Metering(Callback):
    """Keeps state in attributes alone: an object of its own, a copy of the weights, and a list that is emptied again."""

    once_per_host_step = True

    def __init__(self, fresh=True):
        self.meter, self.losses, self.constant, self.fresh = Meter(), [], torch.ones(3), fresh
        self.counts = numpy.zeros(3)

    def on_train_start(self, trainer, module):
        self.trainer, self.module, self.copy = trainer, module, Ledger()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        with torch.no_grad():
            self.copy.w.lerp_(module.w, 0.5)
        self.meter.total += self.fresh
        self.counts[1] += self.fresh

    def on_train_epoch_end(self, trainer, module):
        self.losses.clear()


class Observing(Callback):
    """Has attributes of every kind, none of which it changes."""

    def __init__(self):
        self.words, self.draw, self.own, self.file = {"a": [1, {2}]}, lambda: None, Ledger(), open(os.devnull)

    def on_train_start(self, trainer, module):
        self.trainer, self.weights, self.numbers = trainer, list(module.parameters()), (number for number in range(9))

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        next(self.numbers)


class MeteringKept(Metering):
    def state_dict(self):
        return {"total": self.meter.total}


class Remembering(Ledger):
    def training_step(self, batch, batch_idx):
        self.steps = getattr(self, "steps", 0) + 1
        return self.w * batch[0].mean()


def test_what_is_kept_in_memory_alone_is_named_once_when_a_run_is_resumed(tmp_path):
    def said(*callbacks, module=Remembering, resume=None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = fit(module(), numbered(4), callbacks=list(callbacks), max_epochs=2 if resume else 1, ckpt_path=resume)
        if not resume:
            trainer.save_checkpoint(tmp_path / "a.ckpt")
        return [str(warning.message) for warning in caught if "kept state in memory" in str(warning.message)]

    assert said(Metering(), Observing(), MeteringKept(), Metering(fresh=False)) == []
    (line,) = said(Metering(), Observing(), MeteringKept(), Metering(fresh=False), resume=tmp_path / "a.ckpt")
    assert line.startswith(
        "Metering (copy, counts, meter), Metering 2 (copy), Remembering (steps) kept state in memory that no checkpoint holds"
    )
    (line,) = said(resume=tmp_path / "a.ckpt")  # without these callbacks
    assert line.startswith("Remembering (steps) kept state in memory")
    said(Observing(), module=Still)
    assert said(Observing(), module=Still, resume=tmp_path / "a.ckpt") == []


def test_a_large_attribute_is_watched_by_its_first_values_without_a_copy_of_it():
    values = torch.arange(6000.0)
    attributes = {
        "huge": torch.zeros(2).expand(1 << 40, 2),  # 8 TB if it were copied
        "mirrored": values.view(100, 60).T.contiguous().T,  # the same values in another order in memory
        "tensor": values.view(100, 60),
        "array": values.numpy(),
    }
    before = attribute_fingerprints(attributes)
    assert OPAQUE not in before.values() and before["mirrored"] == before["tensor"] != before["huge"]
    attributes["array"][63] += 1  # the 64th value of "tensor" as well, which lies in the same memory
    after = attribute_fingerprints(attributes)
    assert {name for name in before if after[name] != before[name]} == {"tensor", "array"}


class Still(Ledger):
    def training_step(self, batch, batch_idx):
        return self.w * batch[0].mean()


class Numbers(LightningDataModule):
    """So many numbers, of which those in `held_out` are not trained on."""

    def __init__(self, *held_out, samples=6) -> None:
        super().__init__()
        self.rows = [float(number) for number in range(samples) if number not in held_out]

    def fingerprint(self):
        return repr(self.rows)

    def train_dataloader(self):
        return loader(TensorDataset(torch.tensor(self.rows)))


def test_other_samples_are_refused_within_an_epoch_and_said_between_two(tmp_path):
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
    fit(Ledger(), Numbers(0), callbacks=keep, enable_checkpointing=True)
    for data, words in ((Numbers(0, samples=8), "7 samples, but .* had 5"), (Numbers(1), "5 training samples are not those of the run")):
        with pytest.raises(PlanError, match=words):
            fit(Ledger(), data, ckpt_path=tmp_path / "step=3.ckpt")
        second = Ledger()
        with pytest.warns(UserWarning, match=words):
            fit(second, data, ckpt_path=tmp_path / "step=5.ckpt", max_epochs=2)
        assert second.seen == [[row] for row in data.rows]


def test_epochs_after_the_one_that_a_run_goes_on_in_may_be_shorter(tmp_path):
    class Shrinking(Ledger):
        def train_dataloader(self):
            return numbered(2 if self.trainer.current_epoch else 6)

    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
    options = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}
    fit(Shrinking(), callbacks=keep, enable_checkpointing=True, **options)
    second = Shrinking()
    fit(second, ckpt_path=tmp_path / "step=4.ckpt", **options)
    assert second.seen == [[4.0], [5.0], [0.0], [1.0]]


class Colour(enum.Enum):
    RED = 1


class Strange:
    pass


def test_hyperparameters_of_plain_types_load_again_and_others_are_said_when_the_first_checkpoint_is_written(tmp_path):
    class Hyper(Ledger):
        def __init__(self, extra) -> None:
            super().__init__()
            self.save_hyperparameters()

    plain = {"path": tmp_path, "colour": Colour.RED, "number": numpy.float64(0.1), "rows": numpy.arange(3), "kind": numpy.dtype("int8")}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="save_hyperparameters")
        fit(Hyper(plain), loader(2)).save_checkpoint(tmp_path / "plain.ckpt")
    trainer = fit(Hyper(plain), loader(2), ckpt_path=tmp_path / "plain.ckpt", max_epochs=2)
    assert trainer.global_step == 4 and trainer.lightning_module.w.item() == -4.0
    with pytest.warns(UserWarning, match="save_hyperparameters puts 'extra' .* holds test_resume.Strange"):
        fit(Hyper(Strange()), loader(2)).save_checkpoint(tmp_path / "strange.ckpt")


@pytest.mark.parametrize("monitor", [None, "val_loss"])
def test_stock_lightning_goes_on_with_a_checkpoint(monitor, tmp_path):
    def trained(folder, *, resume=None, every=None, **options):
        module = Net()
        keep = ModelCheckpoint(folder, monitor=monitor, filename="{step}", every_n_train_steps=every, save_top_k=-1)
        stopping = [EarlyStopping("val_loss", patience=9)] if monitor else []
        validation = [loader(classes(7, seed=6), 4)] if monitor else []
        options |= {"enable_checkpointing": True, "callbacks": [keep, *stopping], "num_sanity_val_steps": 0}
        return module, fit(module, loader(classes(16), 2), *validation, ckpt_path=resume, **options)

    whole, _ = trained(tmp_path / "whole", stock=True, accumulate_grad_batches=2, max_epochs=4)
    trained(tmp_path / "ours", A=2, D=2, max_epochs=2)
    stock = {"stock": True, "accumulate_grad_batches": 2, "max_epochs": 4}
    module, trainer = trained(tmp_path / "second", resume=tmp_path / "ours" / "step=8.ckpt", **stock)
    assert (trainer.global_step, trainer.current_epoch) == (16, 4) and len(module.seen) == 16
    for name, value in whole.state_dict().items():
        assert torch.allclose(module.state_dict()[name], value, atol=1e-6), name
    if monitor is None:
        trained(tmp_path / "within", A=2, every=3, max_epochs=1)
        _, trainer = trained(tmp_path / "third", resume=tmp_path / "within" / "step=3.ckpt", **stock)
        assert trainer.current_epoch == 4


def test_a_resumed_run_leaves_the_files_of_one_that_was_not_and_a_finished_one_is_left_alone(tmp_path):
    class Ended(Callback):
        def __init__(self, epoch):
            self.epoch = epoch

        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == self.epoch:
                raise SystemExit

    def files(folder, *callbacks, resume=None):
        keep = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}")
        data, validation = loader(classes(16), 2), loader(classes(7, seed=6), 4)
        module, options = Net(), {"max_epochs": 4, "A": 2, "enable_checkpointing": True, "num_sanity_val_steps": 0}
        fit(module, data, validation, callbacks=[keep, *callbacks], ckpt_path=resume, **options)
        return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    whole = files(tmp_path / "whole")
    for number, (last, epoch) in enumerate([("last.ckpt", 2), ("epoch=1.ckpt", 2), ("epoch=0.ckpt", 1)]):
        folder = tmp_path / str(number)
        with pytest.raises(SystemExit):
            files(folder, Ended(epoch))
        finished = files(folder, resume=folder / last)
        assert set(finished) == set(whole), last
    another = tmp_path / "another"  # folder, in which a last.ckpt of another run is not written over
    another.mkdir()
    (another / "last.ckpt").write_text("kept")
    with pytest.raises(SystemExit):
        files(another, Ended(1))
    files(another, resume=another / "epoch=0.ckpt")
    assert {path.name for path in another.glob("last*")} == {"last.ckpt", "last-v1.ckpt"} and (another / "last.ckpt").read_text() == "kept"
    assert files(tmp_path / "whole", resume=tmp_path / "whole" / "last.ckpt") == whole
