"""What hooks draw and decide: by name and weight update, whatever the device iterations are."""

import random

import numpy
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Timer
from runs import Ledger, Net, classes, csv_logger, csv_rows, fit, loader, make_trainer, numbered
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_ipu import IPUStrategy

# ---- Draws ------------------------------------------------------------------------------------------------------------------------

UPDATE_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


def drawn():
    return torch.rand(()).item(), numpy.random.rand(), random.random()


class Drawing(Net):
    """Draws in every hook of a weight update, and in those that take the place of a part of it."""

    def __init__(self):
        super().__init__(schedule=lambda module, o: {"scheduler": lr_scheduler.ExponentialLR(o, 0.9), "interval": "step"})
        self.draws = []

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.draws.append(("clip", drawn()))

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.draws.append(("zero", drawn()))
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler, metric):
        self.draws.append(("rate", drawn()))
        scheduler.step()


class DrawingCallback(pl.Callback):
    def __init__(self):
        self.draws = []


for hook in UPDATE_HOOKS:
    setattr(Drawing, hook, lambda self, *_, hook=hook: self.draws.append((hook, drawn())))
    setattr(DrawingCallback, hook, lambda self, *_, hook=hook: self.draws.append((hook, drawn())))


@pytest.mark.parametrize("plan", [{}, {"R": 2, "A": 2}], ids=str)
def test_every_hook_of_an_update_draws_by_its_name_and_the_update(plan):
    def run(callbacks=0, **options):
        module, others = Drawing(), [DrawingCallback() for _ in range(callbacks)]
        fit(module, loader(classes(48), 2, shuffle=True), callbacks=others, max_epochs=2, **plan, **options)
        return module.draws, *(callback.draws for callback in others)

    (one,) = run()
    updates = 2 * 24 // (plan.get("R", 1) * plan.get("A", 1))
    assert len(one) == 7 * updates and len(set(one)) == len(one)
    assert len({value for _, values in one for value in values}) == 3 * len(one)
    assert run(D=5) == (one,)
    module, first, second = run(callbacks=2, D=3)
    assert module == one  # whoever else draws
    assert len({*first, *second, *one}) == (7 + 4 + 4) * updates


@pytest.mark.parametrize("device_iterations", [1, 4])
def test_an_update_that_overflows_has_a_number_of_its_own_in_every_draw(device_iterations):
    class Overflowing(Net):
        def __init__(self):
            super().__init__()
            self.transfers, self.zeros, self.steps = [], [], 0

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.transfers.append(torch.rand(()).item())
            return batch

        def on_before_zero_grad(self, optimizer):
            self.zeros.append(torch.rand(()).item())

        def training_step(self, batch, batch_idx):
            self.steps += 1
            return super().training_step(batch, batch_idx) * (float("inf") if self.steps == 5 else 1.0)

    module = Overflowing()
    strategy = IPUStrategy(gradient_accumulation_factor=2, device_iterations=device_iterations, loss_scaling=8.0)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(strategy=strategy, precision="bf16-true", accelerator="cpu", devices=1, max_epochs=1, **options)
    trainer.fit(module, loader(classes(24), 2))
    assert trainer.global_step == 5 and strategy.progress.run_updates == 6
    assert len(set(module.transfers)) == 12 and len(set(module.zeros)) == 6


LOOP_HOOKS = (
    "on_train_start on_train_epoch_start on_train_batch_start on_train_batch_end on_train_epoch_end on_train_end on_validation_start"
    " on_validation_epoch_start on_validation_batch_start on_validation_batch_end on_validation_epoch_end on_validation_end on_save_checkpoint"
).split()


class LoopDrawing(Net):
    """Draws in every hook around batches, epochs and validations, and notes it under the weight update at which it is."""

    once_per_host_step = True

    def __init__(self):
        super().__init__()
        self.draws = []


class LoopDrawingCallback(pl.Callback):
    once_per_host_step = True

    def __init__(self):
        self.draws = []


def note(self, hook, *arguments):
    trainer = arguments[0] if isinstance(self, pl.Callback) else self.trainer
    self.draws.append((hook, trainer.strategy.progress.run_updates, drawn()))


for hook in LOOP_HOOKS:
    setattr(LoopDrawing, hook, lambda self, *arguments, hook=hook: note(self, hook, *arguments))
    setattr(LoopDrawingCallback, hook, lambda self, *arguments, hook=hook: note(self, hook, *arguments))


def test_hooks_of_batches_epochs_and_validations_draw_by_their_names_also_after_resuming(tmp_path):
    def run(stop=-1, resume=None, shift=0, D=2):
        module, callback = LoopDrawing(), LoopDrawingCallback()
        kept = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        data = loader(classes(24), 4, shuffle=True), loader(classes(16), 4)
        trainer = make_trainer(callbacks=[callback, kept], max_epochs=2, max_steps=stop, D=D, enable_checkpointing=True)
        torch.rand(shift), numpy.random.rand(shift + 1)
        before = torch.random.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
        trainer.fit(module, *data, ckpt_path=resume)
        after = torch.random.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
        return module.draws, callback.draws

    whole = run()
    ends = ("on_train_start", "on_train_end")  # of a fit, each of which has its own
    for module_or_callback, first, rest in zip(whole, run(stop=3), run(resume=tmp_path / "step=3.ckpt", shift=5), strict=True):
        assert {hook for hook, *_ in module_or_callback} == set(LOOP_HOOKS)
        assert len({values for *_, values in module_or_callback}) == len(module_or_callback)
        expected = {entry for entry in module_or_callback if entry[0] not in ends}
        assert expected <= {*first, *rest} and {entry for entry in rest if entry[0] not in ends} <= expected
    # A validation is as long, whatever D is; one draws the same in it.
    assert {entry for entry in run(D=1)[0] if "validation" in entry[0]} == {entry for entry in whole[0] if "validation" in entry[0]}


# ---- Decisions --------------------------------------------------------------------------------------------------------------------


def stop_at(module, update):
    module.trainer.should_stop |= module.trainer.global_step == update


class InStep(Net):
    def training_step(self, batch, batch_idx):
        stop_at(self, 3)
        return super().training_step(batch, batch_idx)


class InUpdateHook(Net):
    def on_before_zero_grad(self, optimizer):
        stop_at(self, 3)


class InSchedule(Net):
    def lr_scheduler_step(self, scheduler, metric):
        stop_at(self, 4)
        scheduler.step()


class AtBatchEnd(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        stop_at(self, 4)


class AtBatchStart(Net):
    def on_train_batch_start(self, batch, batch_idx):
        stop_at(self, 3)


class StopCallback(pl.Callback):
    def on_train_batch_end(self, trainer, module, *_):
        stop_at(module, 4)


def decayed(module, optimizer):
    return {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}


@pytest.mark.parametrize("D", [1, 3, 8])
@pytest.mark.parametrize("options", [{}, {"min_steps": 6}, {"max_epochs": 3, "min_epochs": 2}], ids=str)
@pytest.mark.parametrize("kind", [InStep, InUpdateHook, InSchedule, AtBatchEnd, AtBatchStart, StopCallback])
def test_a_wish_to_stop_is_heard_after_the_same_update_as_in_stock_lightning(kind, options, D, tmp_path):
    def run(folder, **more):
        module = Net(schedule=decayed) if kind is StopCallback else kind(schedule=decayed)
        callbacks = [StopCallback()] if kind is StopCallback else []
        logger = csv_logger(folder)
        trainer = fit(
            module,
            loader(classes(16), 2),
            loader(classes(4), 2),
            callbacks=callbacks,
            logger=logger,
            log_every_n_steps=3,
            num_sanity_val_steps=0,
            **options,
            **more,
        )
        losses = [(row["step"], pytest.approx(row["loss_step"], rel=1e-5)) for row in csv_rows(folder) if "loss_step" in row]
        validated = [row["step"] for row in csv_rows(folder) if "val_loss" in row]
        return trainer.global_step, trainer.current_epoch, module.seen, losses, validated

    ours, theirs = run(tmp_path / "ours", D=D), run(tmp_path / "stock", stock=True)
    assert ours == theirs and ours[0] == {"min_steps": 8, "max_epochs": 16}.get(next(iter(options), None), 4)


@pytest.mark.parametrize("D", [1, 2, 4])
def test_a_start_hook_may_end_an_epoch_wherever_it_does_in_stock_lightning(D, caplog):
    class Skipping(Ledger):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx >= 2 else None

    module = Skipping()
    with caplog.at_level("INFO", logger="pytorch_lightning.utilities.rank_zero"):
        trainer = fit(module, loader(6), D=D, max_epochs=2)
    assert (trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.completed) == (4, 4) and module.w.item() == -4
    said = [line for line in caplog.messages if "Skipping.on_train_batch_start is due after every weight update" in line]
    assert len(said) == (D > 1)

    module = Skipping()
    trainer = fit(module, numbered(12), A=2, D=D, max_epochs=2)  # asked before each update, with its first micro-batch's number
    assert trainer.global_step == 2 and module.seen == [[0], [1]] * 2 and module.w.item() == -1


def test_a_time_limit_is_looked_at_after_every_update():
    class Slow(Ledger):
        def on_before_zero_grad(self, optimizer):
            if self.trainer.global_step == 3:
                timer._duration = 0.0  # used up in the fourth update

    timer = Timer(duration={"hours": 1}, verbose=False)
    assert fit(Slow(), loader(16), D=8, callbacks=timer).global_step == 4
    ends = []
    counting = pl.callbacks.LambdaCallback(on_train_batch_end=lambda trainer, *_: ends.append(trainer.global_step))
    counting.once_per_host_step = True
    fit(Ledger(), loader(16), D=8, callbacks=[Timer(), counting])  # it only measures
    assert ends == [8, 16]


def test_hooks_that_need_not_see_every_update_say_so():
    class Counting(pl.Callback):
        def __init__(self):
            self.ends, self.samples = [], 0

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.ends.append(trainer.global_step)
            self.samples += trainer.strategy.progress.step_samples

    every, few = Counting(), Counting()
    few.once_per_host_step = True
    fit(Ledger(), DataLoader(numbered(24).dataset, batch_size=2), A=2, D=4, callbacks=every)
    fit(Ledger(), DataLoader(numbered(24).dataset, batch_size=2), A=2, D=4, callbacks=few)
    assert every.ends == [1, 2, 3, 4, 5, 6] and few.ends == [4, 6] and every.samples == few.samples == 24
