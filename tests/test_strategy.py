"""The strategy under Lightning's Trainer: the ledger's arithmetic, every hook and option honoured or refused, every counter in its unit."""

import math
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.tuner import Tuner
from runs import (
    Ledger,
    Net,
    blocks,
    classes,
    csv_logger,
    csv_rows,
    difference,
    equal_states,
    fit,
    loader,
    make_trainer,
    numbered,
    sgd,
    weights,
)
from test_sampling import SizedStream, Stream
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from lightning_ipu import IPUStrategy
from lightning_ipu.plan import PlanError

# ---- The ledger -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("D", [1, 16])
@pytest.mark.parametrize(
    ("samples", "micro_batch", "R", "A", "epochs", "updates"),
    [
        (6, 1, 1, 4, 1, 1),  # two samples over: left out, no short update
        (12, 1, 2, 4, 1, 1),
        (11, 1, 2, 4, 1, 1),
        (11, 2, 2, 1, 1, 2),  # the last micro-batch itself short
        (16, 1, 2, 4, 3, 6),
        (18, 1, 1, 7, 2, 4),
        (7, 7, 1, 1, 2, 2),
    ],
)
def test_every_weight_update_weighs_its_samples_alike(samples, micro_batch, R, A, epochs, updates, D, caplog):
    module = Ledger()
    with caplog.at_level("INFO", logger="pytorch_lightning.utilities.rank_zero"):
        trainer = fit(module, loader(samples, micro_batch), R=R, A=A, D=D, max_epochs=epochs)

    assert module.w.item() == -updates and trainer.global_step == updates
    left_out = samples - updates // epochs * micro_batch * R * A
    said = [message for message in caplog.messages if "left out of every epoch" in message]
    assert len(said) == (1 if left_out else 0) and trainer.strategy.progress.samples_left_out == left_out
    if left_out:
        assert said[0].startswith(f"{left_out} samples") and f"gradient_accumulation_factor {A}" in said[0]


def test_gradients_are_means_over_micro_batches_and_replicas():
    for R, A, micro_batch in ((1, 1, 24), (2, 3, 4), (3, 2, 4), (4, 6, 1)):
        module = Ledger()
        fit(module, numbered(48, micro_batch), R=R, A=A)
        assert module.w.item() == pytest.approx(-(11.5 + 35.5), abs=1e-5)


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        (3, {"micro_batch": 4}),
        (60, {"micro_batch": 8, "R": 4, "A": 4}),
        (3, {"micro_batch": 1, "A": 8}),
        (64, {"micro_batch": 8, "A": 2, "limit_train_batches": 1}),
        (64, {"micro_batch": 8, "A": 4, "limit_train_batches": 0.4}),
        (0, {"micro_batch": 1}),
    ],
    ids=str,
)
def test_fewer_samples_than_one_update_is_an_error_that_names_all_factors(samples, options):
    micro_batch = options.pop("micro_batch")
    module = Ledger()
    with pytest.raises(PlanError) as refusal:
        fit(module, loader(samples, micro_batch), D=2, max_epochs=2, **options)
    text, (R, A) = str(refusal.value), (options.get("R", 1), options.get("A", 1))
    for part in (
        f"{samples} samples",
        f"micro-batch {micro_batch}",
        f"factor {A}",
        f"replication_factor {R}",
        f"= {micro_batch * A * R} samples",
    ):
        assert part in text
    assert "\n" not in text and not module.seen


@pytest.mark.parametrize("D", [1, 4])
def test_max_steps_checkpoints_and_validations_count_weight_updates(D, tmp_path):
    """18 micro-batches and A = 7: two whole updates in an epoch."""

    class Validated(Ledger):
        def __init__(self):
            super().__init__()
            self.validated = []

        def on_validation_start(self):
            self.validated.append((self.trainer.current_epoch, self.trainer.global_step))

        def validation_step(self, batch, batch_idx):
            self.log("loss", -self.w)

        def training_step(self, batch, batch_idx):
            self.log("train", self.w)
            return super().training_step(batch, batch_idx)

    module = Validated()
    keep = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=10, save_top_k=-1)
    trainer = fit(
        module,
        loader(18),
        loader(1),
        A=7,
        D=D,
        max_steps=25,
        max_epochs=-1,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        callbacks=keep,
        enable_checkpointing=True,
        logger=csv_logger(tmp_path),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    assert trainer.global_step == 25 and module.w.item() == -25
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["epoch=4-step=10.ckpt", "epoch=9-step=20.ckpt"]
    assert [step for _, step in module.validated] == [3, 6, 9, 12, 15, 18, 21, 24]
    rows = [row for row in csv_rows(tmp_path) if "train" in row]
    assert [(row["epoch"], row["step"], row["train"]) for row in rows] == [(k // 2, k, -k) for k in range(25)]


# ---- BatchNorm under a plan -------------------------------------------------------------------------------------------------------


class Normed(pl.LightningModule):
    """One BatchNorm on single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1, momentum=0.1)

    def training_step(self, batch, batch_idx):
        return self.norm(batch[0]).sum() * 0

    def validation_step(self, batch, batch_idx):
        self.log("value", self.norm(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def column(*values: float) -> TensorDataset:
    return TensorDataset(torch.tensor(values)[:, None])


@pytest.mark.parametrize(
    ("values", "micro_batch", "plan", "mean", "variance", "counter"),
    [
        ([0.0, 2.0, 10.0, 12.0], 4, {}, 0.6, 4.3667, 1),
        ([0.0, 2.0, 10.0, 12.0], 2, {"A": 2}, 1.19, 1.19, 2),
        ([0.0, 2.0, 10.0, 12.0], 2, {"A": 2, "recompute": ["norm"]}, 1.19, 1.19, 2),
        ([0.0, 2.0, 10.0, 12.0], 2, {"R": 2}, 0.6, 1.1, 1),
        ([0.0, 0.0, 10.0, 10.0], 2, {"R": 2}, 0.5, 0.9, 1),
        ([1.0, 3.0], 2, {"recompute": ["norm"]}, 0.2, 1.1, 1),
    ],
    ids=str,
)
def test_statistics_follow_the_micro_batch_and_are_the_mean_over_replicas(values, micro_batch, plan, mean, variance, counter, tmp_path):
    module = Normed()
    trainer = fit(module, loader(column(*values), micro_batch), **plan)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]

    assert saved["norm.running_mean"].item() == pytest.approx(mean, abs=1e-4)
    assert saved["norm.running_var"].item() == pytest.approx(variance, abs=1e-4)
    assert saved["norm.num_batches_tracked"].item() == counter
    values = [
        make_trainer(R=R).validate(Normed(), loader(column(1.0, 2.0, 5.0), 2), ckpt_path=tmp_path / "a.ckpt", verbose=False)[0]["value"]
        for R in (1, 2, 4)
    ]
    assert len(set(values)) == 1


def test_a_buffer_that_is_put_anew_in_its_place_is_kept_apart_by_replica_like_any_other():
    class Averaging(Ledger):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(()))
            self.register_buffer("calls", torch.tensor(0))
            self.register_buffer("constant", torch.tensor(0.1))

        def training_step(self, batch, batch_idx):
            self.average = 0.5 * self.average + 0.5 * batch[0].mean()
            self.calls = self.calls + 1
            return super().training_step(batch, batch_idx)

    module = Averaging()
    fit(module, numbered(8), R=2, A=2)
    # First update: replica 0 saw 0, 1 and stands at 0.5, replica 1 saw 2, 3 and stands at 2; second, from their mean 1.25: 5.0625 and 6.5625.
    assert module.average.item() == pytest.approx((1.25 / 4 + 4 / 4 + 5 / 2 + 1.25 / 4 + 6 / 4 + 7 / 2) / 2)
    assert module.calls.item() == 4 and module.constant.item() == torch.tensor(0.1).item()


def test_a_buffer_that_holds_nothing_or_no_number_before_it_is_seen_is_the_mean_over_replicas_as_well():
    class Ranging(Ledger):
        def __init__(self):
            super().__init__()
            self.register_buffer("lowest", torch.tensor(float("inf")))
            self.register_buffer("sums", torch.tensor([]))
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

        def training_step(self, batch, batch_idx):
            self.lowest = torch.minimum(self.lowest, batch[0].min())
            if not len(self.sums):
                self.sums.resize_(2).zero_()
            self.sums += batch[0].sum()
            return super().training_step(batch, batch_idx)

    module = Ranging()
    fit(module, numbered(8), R=2, A=2)
    # Replicas of the first update have 0, 1 and 2, 3: their means are 1 and 3. Those of the second, from there, have 4, 5 and 6, 7.
    assert module.lowest.item() == 1.0 and module.sums.tolist() == [14.0, 14.0]
    assert module.mask.tolist() == [0.0, float("-inf")]


class Filling(Ledger):
    """Buffers that are None or empty until a micro-batch fills them, and whole numbers that differ between replicas."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", None)
        self.register_buffer("history", torch.tensor([]))
        self.register_buffer("present", torch.tensor(7.0))
        self.register_buffer("last", None)
        self.register_buffer("largest", torch.tensor([-(2**62), 0]))
        self.register_buffer("odd", torch.tensor(False))

    def training_step(self, batch, batch_idx):
        mean = batch[0].mean()
        self.average = mean if self.average is None else 0.5 * self.average + 0.5 * mean
        self.history = torch.cat([self.history, mean[None]])
        self.present = None
        self.last = batch[0].long().max()
        self.largest[0] += self.last
        self.largest[1] = self.last
        self.odd = self.last % 2 == 1
        return super().training_step(batch, batch_idx)


FILLED = {  # by two weight updates of two replicas with two micro-batches each of one sample from 0, 1, ...
    # 0, 1 and 2, 3 give 0.5 and 2.5, whose mean 1.5 goes into 4, 5 and 6, 7: 3.875 and 5.375
    "average": 4.625,
    "history": [1.0, 2.0, 5.0, 6.0],
    "present": None,
    # of replica 0 alone
    "last": 5,
    "largest": [-(2**62) + 0 + 1 + 4 + 5, 5],
    "odd": True,
}


def test_a_buffer_that_is_none_at_first_is_so_in_every_replica_and_then_the_mean_or_replica_0s():
    module = Filling()
    fit(module, numbered(8), R=2, A=2)
    assert {name: buffer if buffer is None else buffer.tolist() for name, buffer in module._buffers.items()} == FILLED


def test_a_run_with_a_buffer_that_was_filled_goes_on_from_its_checkpoint(tmp_path):
    class Growing(Filling):
        def training_step(self, batch, batch_idx):
            self.history = torch.tensor([]) if self.history.numel() > 1 else self.history
            loss = super().training_step(batch, batch_idx)
            self.present = torch.tensor(7.0)
            return loss

    trainer = fit(Growing(), numbered(8), R=2, A=2, max_steps=1, max_epochs=-1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed, whole = Growing(), Growing()
    fit(resumed, numbered(8), R=2, A=2, ckpt_path=tmp_path / "a.ckpt")
    fit(whole, numbered(8), R=2, A=2)
    assert equal_states(resumed, whole) and resumed.average.item() == FILLED["average"]


def test_a_buffer_that_the_forward_registers_is_kept_apart_by_replica_like_any_other():
    class Registering(Ledger):
        def training_step(self, batch, batch_idx):
            mean = batch[0].mean()
            if not hasattr(self, "average"):
                self.register_buffer("average", mean.clone())
            else:
                self.average.lerp_(mean, 0.5)
            return super().training_step(batch, batch_idx)

    module = Registering()
    fit(module, numbered(8), R=2, A=2)
    assert module.average.item() == FILLED["average"]


def test_a_buffer_of_another_shape_in_each_replica_is_that_of_replica_0():
    class Uneven(Filling):
        def training_step(self, batch, batch_idx):
            if batch_idx < 4:
                self.history = batch[0].new_ones(1 + int(batch[0]))
            elif batch_idx == 7:
                self.history = None  # in replica 1 alone
            else:
                self.history += batch[0]
            return self.w * 0

    module = Uneven()
    fit(module, numbered(4), R=2, A=2)
    assert module.history.tolist() == [1.0, 1.0]
    module = Uneven()
    fit(module, numbered(8), R=2, A=2)
    assert module.history.tolist() == [10.0, 10.0]


# ---- Hooks and options that are honoured ------------------------------------------------------------------------------------------

HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


class Hooked(Ledger):
    def __init__(self):
        super().__init__()
        self.calls = []

    def on_before_zero_grad(self, optimizer):
        self.calls.append("module on_before_zero_grad")

    def on_before_backward(self, loss):
        self.calls.append("module on_before_backward")

    def on_after_backward(self):
        self.calls.append("module on_after_backward")
        self.gradient = self.w.grad.item()

    def on_before_optimizer_step(self, optimizer):
        assert isinstance(optimizer, torch.optim.SGD)
        self.calls.append("module on_before_optimizer_step")


class HookedCallback(pl.Callback):
    def on_before_zero_grad(self, trainer, module, optimizer):
        module.calls.append("callback on_before_zero_grad")

    def on_before_backward(self, trainer, module, loss):
        module.calls.append("callback on_before_backward")

    def on_after_backward(self, trainer, module):
        module.calls.append("callback on_after_backward")

    def on_before_optimizer_step(self, trainer, module, optimizer):
        module.calls.append("callback on_before_optimizer_step")


@pytest.mark.parametrize("plan", [{}, {"R": 2, "A": 3}, {"D": 4}, {"R": 3, "A": 2, "D": 16, "recompute": False}], ids=str)
def test_hooks_around_an_update_are_called_once_for_each_in_lightnings_order(plan):
    module = Hooked()
    per_update = plan.get("R", 1) * plan.get("A", 1)
    fit(module, numbered(6 * per_update), callbacks=HookedCallback(), **plan)
    assert module.calls == [f"{who} {hook}" for hook in HOOKS for who in ("callback", "module")] * 6
    assert module.gradient == pytest.approx(6 * per_update - (per_update + 1) / 2, abs=1e-5)  # the mean over the last update's samples


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("plan", [{}, {"A": 4}, {"R": 2, "A": 2}, {"D": 4}, {"R": 4, "D": 16, "recompute": ["head"]}], ids=str)
def test_gradients_are_clipped_once_an_update_after_their_mean(plan, algorithm):
    class Clipped(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.head, self.moves = torch.nn.Linear(4, 1, bias=False), []
            torch.nn.init.zeros_(self.head.weight)

        def training_step(self, batch, batch_idx):
            return 1e6 * self.head(torch.ones(1, 4)).sum() * batch[0].mean()

        def on_before_zero_grad(self, optimizer):
            self.moves.append(self.head.weight.detach().clone())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    module = Clipped()
    fit(module, loader(32), gradient_clip_val=1e-3, gradient_clip_algorithm=algorithm, **plan)
    states = [*module.moves, module.head.weight.detach()]
    moves = [(after - before) for before, after in zip(states, states[1:], strict=False)]
    assert len(moves) == 32 // (plan.get("A", 1) * plan.get("R", 1))
    for move in moves:
        assert (move.norm() if algorithm == "norm" else move.abs().max()).item() == pytest.approx(0.5e-3, rel=1e-4)


@pytest.mark.parametrize("plan", [{}, {"R": 2, "A": 2, "D": 4}], ids=str)
def test_a_modules_own_clipping_schedule_zero_grad_and_backward_are_used(plan):
    calls = []

    class Own(Net):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            calls.append(("clip", gradient_clip_val, gradient_clip_algorithm))
            self.clip_gradients(optimizer, gradient_clip_val=1e-9, gradient_clip_algorithm="norm")

        def lr_scheduler_step(self, scheduler, metric):
            calls.append(("schedule", metric))
            scheduler.step()

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            calls.append(("zero_grad", epoch, type(optimizer)))
            optimizer.zero_grad(set_to_none=False)

        def backward(self, loss, *args, **kwargs):
            calls.append(("backward",))
            loss.backward(*args, **kwargs)

    module = Own(schedule=lambda module, optimizer: {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"})
    before = weights(module)
    per_update = plan.get("R", 1) * plan.get("A", 1)
    fit(module, loader(classes(4 * per_update)), **plan)

    assert calls == [("zero_grad", 0, torch.optim.SGD), *[("backward",)] * per_update, ("clip", None, None), ("schedule", None)] * 4
    assert difference(weights(module), before) < 1e-8 and module.rates == [0.1, 0.05, 0.025, 0.0125]


@pytest.mark.parametrize("where", ["module", "datamodule"])
def test_transfer_hooks_see_every_micro_batch_under_seeds_of_its_place(where):
    def recorded(D):
        seen = []

        class Hooks:
            def on_before_batch_transfer(self, batch, dataloader_idx):
                seen.append(("before", batch[2].tolist()))
                return batch

            def on_after_batch_transfer(self, batch, dataloader_idx):
                x, y, index = batch
                seen.append(("after", index.tolist()))
                return x + torch.rand(()), y, index

        class Module(*((Hooks,) if where == "module" else ()), Net):
            pass

        class Data(*((Hooks,) if where == "datamodule" else ()), pl.LightningDataModule):
            def train_dataloader(self):
                return loader(classes(24), 2)

        module = Module()
        trainer = make_trainer(R=2, A=2, D=D, max_epochs=2)
        trainer.fit(module, datamodule=Data())
        return module, seen

    one, seen = recorded(1)
    assert seen == [(hook, [2 * k, 2 * k + 1]) for _ in range(2) for k in range(12) for hook in ("before", "after")]
    many, again = recorded(16)
    assert again == seen and equal_states(many, one) and many.losses == one.losses


def test_a_training_step_may_return_more_than_its_loss_and_take_the_batch_alone():
    outputs = []

    class Extra(Ledger):
        def training_step(self, batch):
            loss = super().training_step(batch, 0)
            return {"loss": loss, "mean": batch[0].mean()}

        def on_train_batch_end(self, outputs_, batch, batch_idx):
            outputs.append((outputs_["loss"].item(), outputs_["mean"].item(), batch_idx))

    fit(Extra(), numbered(8), R=2, D=2)
    # w is 0, then -0.5, -0.5 - 2.5 and -0.5 - 2.5 - 4.5; outputs, batch and number are the first micro-batch's.
    assert outputs == [(0, 0, 0), (-0.5 * 2, 2, 2), (-3 * 4, 4, 4), (-7.5 * 6, 6, 6)]


@pytest.mark.parametrize("returned", [None, {}, {"mean": torch.ones(())}, 1.0], ids=["nothing", "an empty dict", "no loss", "a number"])
def test_a_step_without_a_loss_is_an_error(returned):
    class Without(Ledger):
        def training_step(self, batch, batch_idx):
            return returned if batch_idx == 1 else super().training_step(batch, batch_idx)

    with pytest.raises(PlanError, match=f"training_step returned {type(returned).__name__}.* micro-batch 1"):
        fit(Without(), loader(4), A=2)


def test_a_start_hook_may_skip_the_rest_of_an_epoch():
    class Skipping(Ledger):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx >= 4 and self.trainer.current_epoch == 0 else None

    module = Skipping()
    trainer = fit(module, loader(8), A=2, max_epochs=2)
    assert trainer.global_step == 2 - 0 + 4 and module.w.item() == -trainer.global_step


# ---- What is refused --------------------------------------------------------------------------------------------------------------


class Manual(Ledger):
    automatic_optimization = False


class OwnStep(Ledger):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class Iterating(Ledger):
    def training_step(self, dataloader_iter):
        return self.w * next(dataloader_iter)[0][0].mean()


class Optimizers(Ledger):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Ledger, {"accumulate_grad_batches": 4}, r"accumulate_grad_batches=4 .* IPUStrategy\(gradient_accumulation_factor=4\)"),
        (Manual, {}, "automatic_optimization=False"),
        (OwnStep, {}, "OwnStep.optimizer_step is overridden"),
        (Iterating, {}, "dataloader_iter"),
        (
            lambda: Optimizers(
                lambda p: [torch.optim.SGD([next(p)], lr=1.0), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)]
            ),
            {},
            "returned several optimizers",
        ),
        (lambda: Optimizers(torch.optim.LBFGS), {}, "LBFGS"),
        (Ledger, {"callbacks": lambda: StochasticWeightAveraging(1e-2)}, "StochasticWeightAveraging"),
        (Ledger, {"callbacks": lambda: GradientAccumulationScheduler({0: 1, 1: 2})}, "GradientAccumulationScheduler"),
        (Ledger, {"callbacks": lambda: BatchSizeFinder()}, "BatchSizeFinder"),
        (Ledger, {"sync_batchnorm": True}, "sync_batchnorm=True"),
        (Ledger, {"devices": 2}, "2 processes cannot serve 1 replicas x 1 stages; legal numbers of processes are 1"),
        (Ledger, {"num_nodes": 2}, "2 processes cannot serve"),
        (Ledger, {"R": 3, "devices": 2}, "2 processes cannot serve 3 replicas x 1 stages; legal numbers of processes are 1, 3"),
        (Ledger, {"val_check_interval": 9}, "val_check_interval=9 is in weight updates, and an epoch has 8"),
        (Ledger, {"R": 0}, "replication_factor=0"),
        (Ledger, {"A": 1.5}, "gradient_accumulation_factor=1.5"),
        (Ledger, {"D": True}, "device_iterations=True"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_before_the_first_step(module, options, message):
    module = module()
    module.validation_step = lambda batch, batch_idx: None
    options = {name: value() if callable(value) else value for name, value in options.items()}
    with pytest.raises(PlanError, match=message) as refusal:
        fit(module, loader(8), loader(1), **options)
    assert "\n" not in str(refusal.value) and not module.seen and module.w.item() == 0


def test_a_trainer_whose_fit_was_refused_can_fit_afterwards():
    trainer = make_trainer(A=2, limit_train_batches=4)
    for wrong in (lambda: Optimizers(torch.optim.LBFGS), Manual):
        with pytest.raises(PlanError):
            trainer.fit(wrong(), loader(8))
    with pytest.raises(PlanError):
        trainer.fit(Ledger(), loader(1))
    module = Ledger()
    trainer.fit(module, loader(8))
    assert module.w.item() == -2 and trainer.limit_train_batches == 4 and trainer.accumulate_grad_batches == 1


def test_an_unknown_option_is_refused_and_the_registered_name_is_the_default_plan():
    with pytest.raises(TypeError, match="find_unused_parameters"):
        IPUStrategy(find_unused_parameters=True)
    with pytest.raises(TypeError):
        IPUStrategy(2)
    strategy = pl.Trainer(strategy="ipu", accelerator="cpu", logger=False, enable_checkpointing=False).strategy
    assert isinstance(strategy, IPUStrategy) and strategy.plan.samples_per_host_step == 1


# ---- Learning-rate schedules ------------------------------------------------------------------------------------------------------


def cosine_with_warmup(module, optimizer):
    total = module.trainer.estimated_stepping_batches
    warmup = lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, total - 4)
    return {"scheduler": lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [4]), "interval": "step"}


def every_third(module, optimizer):
    return {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step", "frequency": 3}


def one_cycle(module, optimizer):
    return {
        "scheduler": lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(module.trainer.estimated_stepping_batches)),
        "interval": "step",
    }


def every_epoch(module, optimizer):
    return {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"}


def every_second_epoch(module, optimizer):
    return {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch", "frequency": 2}


@pytest.mark.parametrize("schedule", [cosine_with_warmup, every_third, one_cycle, every_epoch, every_second_epoch])
def test_the_rate_of_every_update_is_stock_lightnings_whatever_d_and_the_factoring(schedule):
    """1000 samples, 100 to an update, 2 epochs: 20 updates."""

    def rates(micro_batch, **options):
        module = Net(optimizer=partial(torch.optim.SGD, lr=0.1), schedule=schedule)
        trainer = fit(module, loader(classes(1000), micro_batch), max_epochs=2, **options)
        return module.rates, trainer.optimizers[0].param_groups[0]["lr"]

    expected, last = rates(100, stock=True)
    assert len(expected) == 20
    for micro_batch, R, A, D in ((100, 1, 1, 1), (100, 1, 1, 16), (10, 2, 5, 2), (20, 1, 5, 1), (25, 4, 1, 16)):
        assert rates(micro_batch, R=R, A=A, D=D) == (expected, last)
    if schedule is cosine_with_warmup:
        assert expected[:5] == pytest.approx([0.025, 0.04375, 0.0625, 0.08125, 0.1]) and last == pytest.approx(0, abs=1e-9)


def test_cosine_in_updates_has_the_values_of_the_closed_form():
    """12 micro-batches, A = 4, 2 epochs: 6 updates of a half cosine."""
    half = lambda module, optimizer: {"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, 6), "interval": "step"}  # noqa: E731
    for D in (1, 16):
        module = Net(optimizer=partial(torch.optim.SGD, lr=1.0), schedule=half)
        fit(module, loader(classes(12)), A=4, D=D, max_epochs=2)
        assert module.rates == pytest.approx([(1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)])


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_plateau_schedule_sees_its_metric_after_every_update_or_epoch(interval):
    def plateau(module, optimizer):
        return {
            "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=1e9, threshold_mode="abs"),
            "interval": interval,
            "monitor": "loss",
            "frequency": 2 if interval == "step" else 1,
        }

    def rates(**options):
        module = Net(schedule=plateau)
        fit(module, loader(classes(32), 2), max_epochs=4, **options)
        return module.rates

    expected = rates(stock=True)
    assert len(set(expected)) > 1
    assert rates(D=1) == rates(D=16) == expected
    halved = Net(schedule=plateau)
    fit(halved, loader(classes(32), 1), R=2, D=16, max_epochs=4)
    assert halved.rates == expected


def test_several_schedules_of_one_optimizer_all_step():
    class Two(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            half = {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}
            tenth = {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.1), "interval": "epoch"}
            return [optimizer], [half, tenth]

    module = Two()
    fit(module, loader(classes(6), 2), D=16, max_epochs=2)
    assert module.rates == pytest.approx([1, 0.5, 0.25, 0.0125, 0.00625, 0.003125])


# ---- Lightning's counters and triggers --------------------------------------------------------------------------------------------


class Counters(pl.Callback):
    """Lightning's counters at every end of an update, as far as the loop is returned to, of an epoch and of a validation."""

    once_per_host_step = True

    def __init__(self):
        self.seen = []

    def note(self, what, trainer):
        epoch_loop = trainer.fit_loop.epoch_loop
        self.seen.append(
            (
                what,
                trainer.global_step,
                trainer.current_epoch,
                epoch_loop._batches_that_stepped,
                epoch_loop.batch_idx,
                epoch_loop.total_batch_idx,
                trainer.is_last_batch,
                trainer.num_training_batches,
            )
        )

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if isinstance(trainer.strategy, IPUStrategy):
            assert batch_idx + trainer.strategy.progress.step_micro_batches - 1 == trainer.fit_loop.epoch_loop.batch_idx
        self.note("batch", trainer)

    def on_train_epoch_end(self, trainer, module):
        self.note("epoch", trainer)

    def on_validation_end(self, trainer, module):
        self.note("validation", trainer)

    def on_train_end(self, trainer, module):
        self.note("end", trainer)


TRIGGERS = [
    {},
    {"val_check_interval": 0.25},
    {"val_check_interval": 3},
    {"val_check_interval": 7, "check_val_every_n_epoch": None},
    {"check_val_every_n_epoch": 2},
    {"max_steps": 13},
    {"max_steps": 10},
    {"min_steps": 12, "max_epochs": 1},
    {"limit_train_batches": 7},
    {"limit_train_batches": 0.5},
    {"limit_val_batches": 1},
    {"limit_val_batches": 0},
    {"limit_train_batches": 1},
    {"overfit_batches": 3},
    {"fast_dev_run": True},
    {"fast_dev_run": 3},
    {"num_sanity_val_steps": 2},
    {"reload_dataloaders_every_n_epochs": 1},
    {"max_epochs": 0},
]


@pytest.mark.parametrize("D", [1, 16])
@pytest.mark.parametrize("options", TRIGGERS, ids=str)
def test_counters_validations_and_ends_are_stock_lightnings(options, D):
    def counters(**more):
        watch, module = Counters(), Net()
        options_ = {"max_epochs": 3, "num_sanity_val_steps": 0, **options, "callbacks": watch, **more}
        fit(module, loader(classes(20), 2), loader(classes(6), 2), **options_)
        return watch.seen, module

    (ours, module), (theirs, stock) = counters(D=D), counters(stock=True)
    if D > 1:  # the loop is returned to less often; what it then sees is the same
        assert set(ours) <= set(theirs)
        assert [seen for seen in ours if seen[0] != "batch"] == [seen for seen in theirs if seen[0] != "batch"]
    else:
        assert ours == theirs
    assert equal_states(module, stock) and module.seen == stock.seen and module.rates == stock.rates


@pytest.mark.parametrize(
    "options", [{}, {"val_check_interval": 0.5}, {"val_check_interval": 2}, {"max_steps": 7}, {"limit_train_batches": 17}], ids=str
)
def test_under_a_plan_global_step_counts_updates_and_batches_micro_batches(options):
    watch = Counters()
    fit(
        Net(),
        loader(classes(50), 1),
        loader(classes(4), 2),
        R=2,
        A=2,
        D=16,
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=watch,
        **options,
    )
    updates_per_epoch = 4 if "limit_train_batches" in options else 12
    for what, step, epoch, stepped, batch_idx, total, last, batches in watch.seen:
        if what == "batch":
            assert stepped == step - 1 and total == 4 * step - 1 and batch_idx == 4 * (step - epoch * updates_per_epoch) - 1
            assert last == (batch_idx + 1 == batches) and batches == 4 * updates_per_epoch
    validated = [step for what, step, *_ in watch.seen if what == "validation"]
    expected = {"0.5": [6, 12, 18, 24], "2": list(range(2, 25, 2))}.get(
        str(options.get("val_check_interval")), [updates_per_epoch, 2 * updates_per_epoch]
    )
    assert validated == ([] if "max_steps" in options else expected)


@pytest.mark.parametrize("D", [1, 16])
def test_early_stopping_stops_where_stock_lightning_does(D):
    def stopped(**options):
        stop = EarlyStopping("val_loss", patience=1, min_delta=10.0)
        trainer = fit(Net(), loader(classes(20), 2), loader(classes(4), 2), max_epochs=9, callbacks=stop, **options)
        return trainer.global_step, trainer.current_epoch, stop.stopped_epoch, trainer.should_stop

    assert stopped(D=D) == stopped(stock=True)


@pytest.mark.parametrize("make", [lambda: WeightAveraging(), lambda: EMAWeightAveraging(decay=0.5)], ids=["mean", "EMA"])
def test_averages_of_weights_see_every_update(make):
    """Averaging asks after every update; BatchNorm statistics and the averaged weights end up in the module."""

    def averaged(**options):
        module = Net(lambda: blocks(norm=True))
        trainer = fit(module, loader(classes(20), 2), loader(classes(4), 2), max_epochs=2, callbacks=make(), **options)
        return module, trainer.callback_metrics["val_loss"].item()

    (ours, value), (theirs, expected) = averaged(D=16), averaged(stock=True)
    assert equal_states(ours, theirs) and value == pytest.approx(expected, rel=1e-6)


def test_callbacks_that_only_look_work(tmp_path):
    trainer = fit(
        Net(schedule=every_third),
        loader(classes(16), 2),
        R=2,
        D=4,
        callbacks=[LearningRateMonitor("step", log_momentum=True), ModelSummary(max_depth=2)],
        logger=csv_logger(tmp_path),
        log_every_n_steps=1,
    )
    assert [row["lr-SGD"] for row in csv_rows(tmp_path) if "lr-SGD" in row] == pytest.approx([0.1, 0.1, 0.1, 0.05])
    assert trainer.callbacks


def test_a_callback_may_look_into_the_training_loader_at_any_time():
    class Peek(pl.Callback):
        seen, once_per_host_step = [], True

        def look(self, trainer, module):
            self.seen.append([index for _, _, index in trainer.train_dataloader][0].tolist())
            x, _, _ = next(iter(trainer.train_dataloader))
            assert x.shape == (2, 8) and len(trainer.train_dataloader.dataset) == 26

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.look(trainer, module)

        on_train_start = on_train_epoch_start = on_train_epoch_end = look

    plain, looked = Net(), Net()
    training = loader(classes(26), 2, shuffle=True)
    fit(plain, training, R=2, D=4, max_epochs=2)
    peek = Peek()
    fit(looked, training, R=2, D=4, max_epochs=2, callbacks=peek)
    assert equal_states(plain, looked) and plain.seen == looked.seen
    assert len(peek.seen) == 1 + 2 * 4 and all(len(seen) == 2 for seen in peek.seen)


@pytest.mark.parametrize("D", [1, 4])
def test_the_learning_rate_finder_tries_what_stock_lightning_tries(D, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the finder saves the weights there while it tries

    def found(**options):
        module = Net()
        module.lr = 0.1
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=module.lr)
        finder = Tuner(make_trainer(**options)).lr_find(module, loader(classes(60), 2), num_training=12, update_attr=False)
        return finder.results["lr"], finder.results["loss"]

    (rates, losses), (expected, their_losses) = found(D=D), found(stock=True)
    assert rates == expected and losses == pytest.approx(their_losses, rel=1e-5)


def test_the_best_and_the_last_checkpoint_are_those_of_stock_lightning(tmp_path):
    def kept(folder, **options):
        keep = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{step}")
        fit(Net(), loader(classes(40), 4), loader(classes(10), 4), max_epochs=4, callbacks=keep, enable_checkpointing=True, **options)
        files = {path.name: torch.load(path, weights_only=True) for path in folder.iterdir()}
        weights_in = {name: file["state_dict"] for name, file in files.items()}
        return weights_in, {name: (file["global_step"], file["epoch"]) for name, file in files.items()}, float(keep.best_model_score)

    (ours, steps, best), (theirs, their_steps, their_best) = kept(tmp_path / "ours", D=16), kept(tmp_path / "stock", stock=True)
    assert steps == their_steps and best == pytest.approx(their_best, rel=1e-6)
    assert all(torch.equal(value, theirs[name][key]) for name, state in ours.items() for key, value in state.items())


def test_a_reloaded_training_set_may_have_another_size():
    class Growing(pl.LightningDataModule):
        def train_dataloader(self):
            return numbered(8 * (1 + self.trainer.current_epoch))

    module = Ledger()
    trainer = make_trainer(A=2, D=16, max_epochs=3, reload_dataloaders_every_n_epochs=1, limit_train_batches=0.5)
    trainer.fit(module, datamodule=Growing())
    assert [len(seen) for seen in (module.seen[:4], module.seen[4:12], module.seen[12:])] == [4, 8, 12]
    assert trainer.global_step == 12


# ---- Trainers and modules used more than once -------------------------------------------------------------------------------------


def test_a_fit_goes_on_where_the_last_one_of_the_same_trainer_ended():
    whole = Net()
    fit(whole, loader(classes(24), 2, shuffle=True), R=2, D=4, max_epochs=4)
    parts = Net()
    trainer = make_trainer(R=2, D=4, max_epochs=2)
    trainer.fit(parts, loader(classes(24), 2, shuffle=True))
    trainer.fit_loop.max_epochs = 4
    trainer.fit(parts, loader(classes(24), 2, shuffle=True))
    assert trainer.global_step == 24 and parts.seen == whole.seen
    # A second fit begins with a new optimizer, as it does under stock Lightning: the momentum starts anew.
    stock = Net()
    theirs = make_trainer(stock=True, max_epochs=2)
    theirs.fit(stock, loader(classes(24), 4))
    theirs.fit_loop.max_epochs = 4
    theirs.fit(stock, loader(classes(24), 4))
    assert theirs.global_step == trainer.global_step


def test_a_module_can_move_between_trainers():
    module = Net(lambda: blocks(norm=True, dropout=0.5))
    fit(module, loader(classes(16), 2), R=2, recompute=True, precision="64-true")
    assert module.network[1].weight.dtype == torch.float64
    module.float()
    fit(module, loader(classes(16), 2), stock=True)
    fit(module, loader(classes(16), 2), A=2, num_stages=2)
    assert not any("forward" in vars(child) or child._forward_pre_hooks for child in module.modules())
    assert {"log", "_on_before_batch_transfer"}.isdisjoint(vars(module))


def test_evaluation_needs_no_fit_and_no_optimizer():
    class Bare(Net):
        def configure_optimizers(self):
            raise AssertionError("no optimizer is needed")

    module, trainer = Bare(), make_trainer(R=4, A=2, D=8, recompute=["nothing.here"])
    before = weights(module)
    assert trainer.validate(module, loader(classes(9), 4), verbose=False)[0].keys() == {"val_loss", "val_accuracy"}
    assert len(trainer.test(module, loader(classes(9), 4), verbose=False)) == 1
    assert len(trainer.predict(module, loader(classes(9), 4))) == 3
    assert difference(weights(module), before) == 0


def test_several_validation_loaders_keep_apart():
    class Two(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("index", batch[2].double().mean())

    trainer = fit(Two(), loader(classes(8), 2), [loader(classes(5), 2), loader(classes(9), 4)], R=2)
    assert {name: value.item() for name, value in trainer.callback_metrics.items() if "index" in name} == {
        "index/dataloader_idx_0": 2.0,
        "index/dataloader_idx_1": 4.0,
    }


# ---- Precision --------------------------------------------------------------------------------------------------------------------


def test_bf16_mixed_computes_in_bfloat16_and_agrees_with_stock_lightning():
    class Watched(Net):
        def forward(self, x):
            logits = super().forward(x)
            self.dtype_of_logits = logits.dtype
            return logits

    ours, theirs = Watched(partial(blocks, norm=True)), Watched(partial(blocks, norm=True))
    fit(ours, loader(classes(32), 4), D=4, precision="bf16-mixed", recompute=True)
    fit(theirs, loader(classes(32), 4), stock=True, precision="bf16-mixed")
    assert ours.dtype_of_logits == torch.bfloat16 and ours.network[1].weight.dtype == torch.float32
    assert equal_states(ours, theirs)


# ---- Position ---------------------------------------------------------------------------------------------------------------------


class Stop(pl.Callback):
    """Ends a run in the middle: a signal, noted by its handler after so many micro-batches, or an error in the step."""

    once_per_host_step = True

    def __init__(self, path, after: int):
        self.path, self.after, self.count = path, after, 0

    def on_after_backward(self, trainer, module):
        self.count += 1
        if self.count == self.after:
            trainer.strategy.progress.stop_signal = 15

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.strategy.progress.stop_signal is not None:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def data(**options):
    return loader(classes(53), 2, shuffle=True, **options)


def dropping():
    return Net(
        partial(blocks, norm=True, dropout=0.3), schedule=lambda m, o: {"scheduler": lr_scheduler.ExponentialLR(o, 0.9), "interval": "step"}
    )


@pytest.mark.parametrize(("after", "workers"), [(1, 0), (4, 0), (6, 0), (7, 2), (12, 2), (18, 0)])
def test_a_run_that_a_signal_ended_after_any_update_goes_on_as_if_it_had_not(after, workers, tmp_path):
    plan = {"R": 2, "A": 2, "D": 4, "max_epochs": 3}  # 6 updates in an epoch: host steps of 4 and 2
    whole = dropping()
    fit(whole, data(), **plan)
    first = dropping()
    stopped = fit(first, data(num_workers=workers), callbacks=Stop(tmp_path / "a.ckpt", after), **plan)
    second = dropping()
    trainer = fit(second, data(num_workers=workers), ckpt_path=tmp_path / "a.ckpt", **{**plan, "D": 3})

    assert stopped.global_step == after and trainer.global_step == 18
    assert first.seen + second.seen == whole.seen and first.rates + second.rates == whole.rates
    assert equal_states(second, whole)


def test_a_signal_that_is_taken_back_costs_no_sample():
    class Passing(Stop):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.strategy.progress.stop_signal = None

    whole, passed = dropping(), dropping()
    plan = {"R": 2, "D": 16, "max_epochs": 2}
    fit(whole, data(), **plan)
    trainer = fit(passed, data(), callbacks=Passing(None, 5), **plan)
    assert equal_states(passed, whole) and passed.seen == whole.seen and trainer.global_step == 26


@pytest.mark.parametrize("D", [1, 4, 16])
def test_a_checkpoint_written_on_an_error_stands_at_the_last_whole_update(D, tmp_path):
    class Failing(Net):
        def training_step(self, batch, batch_idx):
            if self.trainer.current_epoch == 1 and batch_idx == 21:  # in the middle of the update from 20 to 23
                raise RuntimeError("a bad sample")
            return super().training_step(batch, batch_idx)

    plan = {"R": 2, "A": 2, "D": D, "max_epochs": 2}
    whole = Net()
    fit(whole, data(), **plan)
    failing = Failing()
    keep = OnExceptionCheckpoint(tmp_path, "error")
    with pytest.raises(RuntimeError, match="a bad sample"):
        fit(failing, data(), callbacks=keep, enable_checkpointing=True, **plan)
    saved = torch.load(tmp_path / "error.ckpt", weights_only=True)
    assert saved["global_step"] == 6 + 5

    second = Net()
    fit(second, data(), ckpt_path=tmp_path / "error.ckpt", **plan)
    assert failing.seen[: 11 * 4] + second.seen == whole.seen
    assert equal_states(second, whole)


@pytest.mark.parametrize("every", [1, 4, 6, 9])
@pytest.mark.parametrize("plan", [{}, {"R": 2, "A": 2}, {"R": 2, "A": 2, "D": 4}], ids=str)
def test_a_checkpoint_of_the_trainer_in_an_epoch_or_at_its_end_continues_the_order(plan, every, tmp_path):
    plan = {**plan, "max_epochs": 2}
    whole = dropping()
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    fit(whole, data(), callbacks=keep, enable_checkpointing=True, **plan)
    second = dropping()
    trainer = fit(second, data(), ckpt_path=tmp_path / f"step={every}.ckpt", **plan)
    per_update = plan.get("R", 1) * plan.get("A", 1)
    assert second.seen == whole.seen[every * per_update :] and second.rates == whole.rates[every:]
    assert equal_states(second, whole) and trainer.current_epoch == 2


@pytest.mark.parametrize(("kind", "limit"), [(Stream, {}), (SizedStream, {}), (Stream, {"limit_train_batches": 40})])
def test_a_stream_goes_on_by_skipping_what_was_trained_on(kind, limit, tmp_path):
    class Validated(Ledger):
        def validation_step(self, batch, batch_idx):
            self.seen.append("validated")

    def run(**options):
        module = Validated()
        plan = {"A": 2, "D": 2, "max_epochs": 2, "num_sanity_val_steps": 0}
        fit(module, DataLoader(kind(16), batch_size=1), numbered(1), **plan, **limit, **options)
        return module

    steps = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    epochs = ModelCheckpoint(tmp_path, filename="epoch={epoch}", auto_insert_metric_name=False, save_top_k=-1)
    whole = run(callbacks=[steps, epochs], enable_checkpointing=True)
    for name, step in (("step=3", 3), ("step=8", 8), ("step=11", 11), ("epoch=0", 8)):
        second = run(ckpt_path=tmp_path / f"{name}.ckpt", callbacks=steps, enable_checkpointing=True)
        # That of an epoch is written in its validation's end, that of update 8 before it.
        assert second.seen == whole.seen[2 * step + (step > 8 or name == "epoch=0") :] and second.w.item() == whole.w.item()
        third = run(ckpt_path=tmp_path / "step=13.ckpt")  # of the run that was itself resumed
        assert third.seen == whole.seen[27:]


def test_a_resumed_run_logs_at_the_steps_it_would_have_logged_at(tmp_path):
    plan = {"A": 2, "D": 4, "max_epochs": 2, "log_every_n_steps": 1, "val_check_interval": 0.25, "num_sanity_val_steps": 0}
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    fit(Net(), data(), loader(classes(6), 2), callbacks=keep, enable_checkpointing=True, logger=csv_logger(tmp_path / "whole"), **plan)
    fit(Net(), data(), loader(classes(6), 2), ckpt_path=tmp_path / "step=4.ckpt", logger=csv_logger(tmp_path / "second"), **plan)
    whole, second = csv_rows(tmp_path / "whole"), csv_rows(tmp_path / "second")
    begun = next(k for k, row in enumerate(whole) if row["step"] == 3)  # of the update before the checkpoint, not logged when it was saved
    assert second == whole[begun:]


def test_plain_optimizers_are_the_users_own():
    trainer = fit(Net(optimizer=sgd), DataLoader(classes(8), batch_size=2))
    assert type(trainer.optimizers[0]) is torch.optim.SGD and trainer.strategy.plan.micro_batch_size == 2
