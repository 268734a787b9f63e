"""A run that goes on from any checkpoint equals the run that never stopped: weights, optimizer, rates, validations and every row logged."""

from functools import partial

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from runs import Ledger, Net, blocks, classes, equal_states, fit, loader, numbered
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torchmetrics.classification import MulticlassAccuracy

from lightning_ipu.output import MetricsFile
from lightning_ipu.plan import PlanError
from lightning_ipu.schedule import build_schedule

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
        {"D": 4},
        {"D": 1, "val_check_interval": 0.5},
        {"D": 4, "val_check_interval": 0.25, "max_steps": 16, "max_epochs": None},
        {"D": 16, "check_val_every_n_epoch": 2, "max_steps": 18},
        {"D": 3, "check_val_every_n_epoch": None, "val_check_interval": 4, "workers": 2},
        {"D": 16, "limit_val_batches": 0},
    ],
    ids=str,
)
def test_resuming_from_a_checkpoint_of_any_hook_gives_the_uninterrupted_run(options, tmp_path):
    (tmp_path / "saves").mkdir()
    whole, trainer, noted, rows = run(tmp_path / "whole", save=tmp_path / "saves", **options)
    state = optimizer_state(trainer)
    places = {}
    for save in noted.saves:  # of the many, one of each kind of place
        places.setdefault((save[1], min(save[2] % 6, 3), save[2] // 12), save)
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


def test_a_checkpoint_on_an_error_within_an_update_holds_the_statistics_before_it(tmp_path):
    class Failing(Measured):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 10:
                raise RuntimeError("a bad sample")
            return loss

    whole, plan = Measured(), {"A": 4, "max_epochs": 1}
    fit(whole, loader(classes(53), 2), **plan)
    with pytest.raises(RuntimeError):
        fit(Failing(), loader(classes(53), 2), callbacks=OnExceptionCheckpoint(tmp_path, "error"), enable_checkpointing=True, **plan)
    second = Measured()
    fit(second, loader(classes(53), 2), ckpt_path=tmp_path / "error.ckpt", **plan)
    assert equal_states(second, whole)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"A": 4}, r"replication_factor x gradient_accumulation_factor is 8, but .* trained with 4"),
        ({"seed": 2}, "the seed is 2, but .* trained with 1"),
        ({"precision": "bf16-mixed"}, "precision is bf16-mixed, but .* trained with 32-true"),
        ({"data": 21}, "stands after weight update 4 of its epoch, which now has 2"),
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
