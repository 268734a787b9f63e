"""What a user's steps log reaches Lightning as if its own loop had run them: averages by samples, rows by weight updates."""

import math

import pytest
import pytorch_lightning as pl
import torch
from runs import Ledger, Net, blocks, classes, csv_logger, csv_rows, fit, loader, make_trainer, numbered
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset
from torchmetrics import ClasswiseWrapper, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_ipu.loop.batches import samples_in
from lightning_ipu.loop.logs import differing_names
from lightning_ipu.loop.metrics import SharedMetrics, metric_states
from lightning_ipu.plan import PlanError

PLANS = [{}, {"A": 3}, {"R": 3, "D": 2}, {"D": 16}]


# ---- Averages ---------------------------------------------------------------------------------------------------------------------


class Scored(Dataset):
    """Ten samples of which the last two are wrong, in batches of three shapes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self):
        return 10

    def __getitem__(self, index):
        right = torch.tensor(float(index < 8))
        return {
            "tensor": right,
            "tuple": (torch.zeros(7), right),
            "dict": {"meta": "name", "right": right},
            "nested": {"weights": {"a": (torch.zeros(3, 2), "x")}, "right": [right]},
        }[self.kind]


def right_of(batch, kind: str) -> torch.Tensor:
    return {"tensor": lambda: batch, "tuple": lambda: batch[1], "dict": lambda: batch["right"], "nested": lambda: batch["right"][0]}[kind]()


@pytest.mark.parametrize("R", [1, 4])
@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "nested"])
@pytest.mark.parametrize("batch", [1, 4, 7, 10])
def test_a_small_last_batch_weighs_by_its_samples(batch, kind, R):
    class Accuracy(Ledger):
        def validation_step(self, batch, batch_idx):
            self.log("accuracy", right_of(batch, kind).double().mean())
            self.log("own", right_of(batch, kind).double().mean(), batch_size=1)
            self.log("count", float(len(right_of(batch, kind))), reduce_fx="sum")

    (metrics,) = make_trainer(R=R).validate(Accuracy(), DataLoader(Scored(kind), batch_size=batch), verbose=False)
    batches = [8 / 10] if batch == 10 else {1: [1] * 8 + [0, 0], 4: [1, 1, 0], 7: [1, 1 / 3]}[batch]
    assert metrics["accuracy"] == pytest.approx(0.8, abs=1e-12)
    assert metrics["own"] == pytest.approx(sum(batches) / len(batches), abs=1e-12)
    assert metrics["count"] == 10


def test_the_value_of_an_evaluation_is_the_one_logged_at_the_end_of_the_fit(tmp_path):
    training, validation = classes(64), classes(23, seed=6)
    for plan, batch in (({}, 4), ({"R": 2, "A": 2}, 5), ({"R": 4, "D": 16, "recompute": True}, 23)):
        trainer = fit(Net(lambda: blocks(norm=True, dropout=0.2)), loader(training, 4), loader(validation, batch), max_epochs=2, **plan)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        logged = trainer.callback_metrics["val_loss"].item()
        for other, size in (({}, 1), ({"R": 2, "D": 3}, 23), (plan, batch)):
            again = make_trainer(**other).validate(
                Net(lambda: blocks(norm=True, dropout=0.2)), loader(validation, size), ckpt_path=tmp_path / "last.ckpt", verbose=False
            )
            assert again[0]["val_loss"] == pytest.approx(logged, rel=1e-6)


def test_averages_are_added_in_float64():
    class Long(Ledger):
        def training_step(self, batch, batch_idx):
            self.log("value", torch.tensor(16777216.0 if batch_idx == 0 else 1.0), on_epoch=True, on_step=False)
            return super().training_step(batch, batch_idx)

    trainer = fit(Long(), loader(400), D=16)
    assert trainer.callback_metrics["value"].item() == (16777216 + 399) / 400  # in float32 the ones are lost


# ---- Rows -------------------------------------------------------------------------------------------------------------------------


class Everything(pl.LightningModule):
    """Logs in every way that a step and its hooks may, knowing what it logged."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.mean_metric, self.accuracy = MeanMetric(), MulticlassAccuracy(2)
        self.pair = MetricCollection({"f1": MulticlassF1Score(2, average="micro"), "acc": MulticlassAccuracy(2, average="micro")})

    def training_step(self, batch, batch_idx):
        x = batch[0]
        self.log("both", x.mean(), on_step=True, on_epoch=True, prog_bar=True)
        self.log("whole", x.mean(), on_step=False, on_epoch=True)
        self.log("each", x.mean())
        self.log("positional", x.mean(), False, True, True, True, "max")
        for name in ("sum", "min", "max"):
            self.log(name, x.mean(), on_step=True, on_epoch=True, reduce_fx=name)
        self.log("torch max", x.mean(), on_epoch=True, on_step=False, reduce_fx=torch.max)
        self.log("number", 2.5 * batch_idx, on_step=True)
        self.log("integer", batch_idx, on_step=True)
        self.log_dict({"one": x.min(), "two": x.max()}, on_epoch=True, on_step=False)
        self.log("silent", x.mean(), logger=False, on_epoch=True)
        if batch_idx % 6 == 0:
            self.log("sometimes", x.mean())
        self.log("weight", self.w)
        self.mean_metric(x)
        self.log("metric", self.mean_metric, on_step=True, on_epoch=True)
        self.pair.update((x > 5).long(), (x > 4).long())
        self.log_dict(self.pair, on_step=False, on_epoch=True)
        return self.w * x.mean()

    def on_after_backward(self):
        self.log("gradient", self.w.grad)

    def on_before_optimizer_step(self, optimizer):
        self.log("gradient, epoch", self.w.grad, on_step=True, on_epoch=True)

    def on_train_epoch_end(self):
        self.log("end", float(self.trainer.current_epoch))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x = batch[0]
        self.log("v", x.mean())
        self.log("v both", x.mean(), on_step=True, on_epoch=True)
        self.log("v sum", x.sum(), reduce_fx=torch.sum)
        self.log("v min", x.min(), reduce_fx=min)
        if dataloader_idx == 0:
            self.accuracy(torch.stack([x, 4 - x], 1), torch.ones_like(x, dtype=torch.long))
            self.log("v accuracy", self.accuracy, add_dataloader_idx=False)
        self.log(f"v own name {dataloader_idx}", x.mean(), add_dataloader_idx=False)

    def on_validation_epoch_end(self):
        self.log("v end", 3.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def everything(folder, *, stock=False, every=1, loaders=1, **plan):
    trainer = fit(
        Everything(),
        numbered(36, 2, shuffle=not stock),
        [numbered(7, 3), numbered(5, 2)][:loaders] if loaders > 1 else numbered(7, 3),
        stock=stock,
        max_epochs=2,
        logger=csv_logger(folder),
        log_every_n_steps=every,
        num_sanity_val_steps=0,
        **plan,
    )
    return {name: value.item() for name, value in trainer.callback_metrics.items()}, csv_rows(folder)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("plan", [{}, {"R": 3}, {"A": 2}], ids=str)
def test_rows_and_metrics_are_bit_equal_for_every_d(plan, every, tmp_path):
    one = everything(tmp_path / "1", every=every, **plan)
    for D in (2, 3, 16):
        assert everything(tmp_path / str(D), every=every, D=D, **plan) == one


@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize("every", [1, 4])
def test_names_rows_and_values_are_stock_lightnings(every, loaders, tmp_path):
    class Ordered(Everything):
        pass

    def run(folder, **options):
        trainer = fit(
            Ordered(),
            numbered(36, 2),
            [numbered(7, 3), numbered(5, 2)] if loaders == 2 else numbered(7, 3),
            max_epochs=2,
            logger=csv_logger(folder),
            log_every_n_steps=every,
            num_sanity_val_steps=0,
            **options,
        )
        return {name: value.item() for name, value in trainer.callback_metrics.items()}, csv_rows(folder)

    (metrics, rows), (their_metrics, their_rows) = run(tmp_path / "ours", D=4), run(tmp_path / "stock", stock=True)
    assert metrics == pytest.approx(their_metrics, rel=1e-6)
    assert len(rows) == len(their_rows)
    for row, their_row in zip(rows, their_rows, strict=True):
        assert row == pytest.approx(their_row, rel=1e-6)


@pytest.mark.parametrize("D", [1, 4])
def test_a_callback_logs_with_its_own_log_what_it_does_in_stock_lightning(D, tmp_path):
    hooks = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_validation_batch_end")

    def logging(hook):
        return lambda self, trainer, module, *_: self.log(hook, float(trainer.global_step), on_step=True, on_epoch=True)

    def run(folder, **options):
        callback = type("Logging", (pl.Callback,), {hook: logging(hook) for hook in hooks})()
        trainer = fit(
            Net(),
            loader(classes(20), 2),
            loader(classes(4), 2),
            callbacks=[callback],
            logger=csv_logger(folder),
            log_every_n_steps=1,
            **options,
        )
        metrics = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        return [{name: value.item() for name, value in some.items()} for some in metrics], csv_rows(folder)

    (metrics, rows), (their_metrics, their_rows) = run(tmp_path / "ours", D=D), run(tmp_path / "stock", stock=True)
    for mine, theirs in zip(metrics + rows, their_metrics + their_rows, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert metrics[0]["on_after_backward_epoch"] == 4.5  # the mean of 0 to 9


def test_options_that_are_written_out_are_the_ones_that_lightning_takes_itself():
    class Twice(Ledger):
        def training_step(self, batch, batch_idx):
            self.log("a", 1.0)
            self.log("a", 2.0, on_step=True, on_epoch=False, prog_bar=False, logger=True, reduce_fx=torch.mean, batch_size=2)
            return super().training_step(batch, batch_idx)

    assert fit(Twice(), loader(4)).callback_metrics["a"] == 2.0


def test_reductions_over_an_epoch_are_over_its_micro_batches(tmp_path):
    for plan in PLANS:
        metrics, rows = everything(tmp_path / str(plan), **plan)
        assert metrics["both_epoch"] == metrics["whole"] == metrics["metric_epoch"] == 17.5
        assert metrics["sum_epoch"] == 18 * 17.5 and metrics["f1"] == metrics["acc"] == pytest.approx(35 / 36)
        assert metrics["min_epoch"] >= 0.5 and metrics["max_epoch"] == metrics["torch max"] == metrics["positional_epoch"] <= 34.5
        assert metrics["v"] == 3 and metrics["v sum"] == 21 and metrics["v min"] == 0 and metrics["end"] == 1
        steps = [row["both_step"] for row in rows if "both_step" in row]
        assert sum(steps) / len(steps) == pytest.approx(17.5) and len(steps) == 36 / plan.get("A", 1) / plan.get("R", 1)


@pytest.mark.parametrize("D", [1, 16])
@pytest.mark.parametrize("options", [{"max_epochs": 2}, {"max_steps": 2}, {"stream": True}], ids=str)
def test_a_short_run_shows_a_training_loss_in_every_epoch_and_its_steps_increase(options, D, tmp_path):
    from test_sampling import Stream

    class Losing(Ledger):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    stream = options.get("stream")
    options = {name: value for name, value in options.items() if name != "stream"}
    train = DataLoader(Stream(3), batch_size=1) if stream else loader(3)
    fit(Losing(), train, D=D, logger=csv_logger(tmp_path), **options)
    rows = [row for row in csv_rows(tmp_path) if "loss" in row]
    assert [row["epoch"] for row in rows] == list(range(options.get("max_epochs", 1)))
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)) and steps[-1] == options.get("max_steps", 3 * options.get("max_epochs", 1)) - 1


def test_logging_every_zero_steps_is_none(tmp_path):
    everything_off = fit(Net(), loader(classes(12), 2), D=4, logger=csv_logger(tmp_path), log_every_n_steps=0)
    assert everything_off.global_step == 6
    assert not any("loss_step" in row for row in csv_rows(tmp_path))


# ---- Values -----------------------------------------------------------------------------------------------------------------------


def test_a_value_is_the_one_at_the_moment_it_was_logged(tmp_path):
    class Changing(Ledger):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx) + 1
            self.log("w", self.w)
            self.log("before", loss)
            loss += 1
            return loss

    fit(Changing(), loader(4), D=4, logger=csv_logger(tmp_path), log_every_n_steps=1)
    rows = [row for row in csv_rows(tmp_path) if "w" in row]
    assert [row["w"] for row in rows] == [0, -1, -2, -3]
    assert [row["before"] for row in rows] == [1, 0, -1, -2]


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_a_value_that_is_no_number_stays_in_every_reduction(reduce_fx):
    class Broken(Ledger):
        def training_step(self, batch, batch_idx):
            self.log("value", float("nan") if batch_idx == 1 else 1.0, on_epoch=True, on_step=False, reduce_fx=reduce_fx)
            return super().training_step(batch, batch_idx)

    assert math.isnan(fit(Broken(), loader(4), D=4).callback_metrics["value"])


def test_a_modules_own_log_stands_above(tmp_path):
    class Prefixed(Net):
        def log(self, name, value, **options):
            super().log(f"mine/{name}", value, **options)

    trainer = fit(Prefixed(), loader(classes(8), 2), loader(classes(4), 2), D=2)
    assert {"mine/loss_epoch", "mine/val_loss"} <= set(trainer.callback_metrics)
    assert not {"loss", "val_loss"} & set(trainer.callback_metrics)


def test_the_recorder_leaves_no_trace_on_the_module():
    module, log = Net(), pl.LightningModule.log
    fit(module, loader(classes(8), 2), loader(classes(8), 2))
    assert pl.LightningModule.log is log and "log" not in vars(module)

    class Failing(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("user's own")

    with pytest.raises(RuntimeError, match="user's own"):
        fit(Failing(), loader(classes(8), 2))
    assert pl.LightningModule.log is log


@pytest.mark.parametrize(
    ("log", "error", "message"),
    [
        (lambda self: self.log("a", torch.ones(3)), ValueError, "'a'.* 3 elements"),
        (lambda self: (self.log("a", 1.0), self.log("a", 1.0, on_epoch=True)), PlanError, "'a'.*different options"),
        (lambda self: self.log("a", {"b": 1.0}), ValueError, "'a'.*dict"),
        (lambda self: self.log("a", "text"), ValueError, "'a'.*str"),
        (lambda self: self.log("a", 1.0, on_epoch=True, reduce_fx="median"), Exception, "reduce_fx"),
    ],
)
def test_what_cannot_be_logged_is_refused_by_its_name(log, error, message):
    class Wrong(Ledger):
        def training_step(self, batch, batch_idx):
            log(self)
            return super().training_step(batch, batch_idx)

    with pytest.raises(error, match=message):
        fit(Wrong(), loader(2))


def test_a_metric_with_a_list_state_and_without_a_step_value_is_computed_over_the_epoch():
    class Ranked(Net):
        def __init__(self):
            super().__init__()
            self.auroc = MulticlassAUROC(3)
            self.all = [[], []]

        def validation_step(self, batch, batch_idx):
            x, y, _ = batch
            probabilities = self(x).softmax(1)
            self.auroc.update(probabilities, y)
            self.log("auroc", self.auroc)
            self.all[0].append(probabilities), self.all[1].append(y)

    module = Ranked()
    (metrics,) = make_trainer(R=2, D=4).validate(module, loader(classes(50), 7), verbose=False)
    assert metrics["auroc"] == pytest.approx(MulticlassAUROC(3)(torch.cat(module.all[0]), torch.cat(module.all[1])).item())


def test_a_step_that_draws_its_evaluation_batches_itself_is_heard():
    class Iterating(Ledger):
        def validation_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            self.log("mean", batch[0].mean(), batch_size=len(batch[0]))

    (metrics,) = make_trainer().validate(Iterating(), numbered(10, 4), verbose=False)
    assert metrics["mean"] == 4.5


def test_progress_shows_the_latest_values_while_a_host_step_runs():
    class Watching(Net):
        def training_step(self, batch, batch_idx):
            progress = self.trainer.strategy.progress
            self.seen_progress = [*getattr(self, "seen_progress", []), (progress.samples_done, progress.updates_done)]
            loss = super().training_step(batch, batch_idx)
            assert float(progress.latest["loss"]) == pytest.approx(loss.item())
            return loss

    module = Watching()
    trainer = fit(module, loader(classes(27), 2), R=2, A=2, D=3, max_epochs=2)
    assert module.seen_progress == [(2 * k, k // 4 % 3) for k in range(24)]
    progress = trainer.strategy.progress
    assert (progress.updates_per_epoch, progress.samples_left_out, progress.samples_done, progress.updates_done) == (3, 3, 48, 3)
    assert trainer.strategy.plan.micro_batch_size == 2


def test_values_of_processes_are_compared_by_name():
    nan = math.nan
    assert differing_names([{"a": 1.0, "a_epoch": 1.0, "b": nan, "c": nan, "d": 1.0}, {"a": 2.0, "a_epoch": 2.0, "b": nan, "c": 0.0}]) == [
        "a",
        "c",
    ]


def test_shared_metrics_are_merged_once_and_go_on_from_their_own():
    class Wrapped(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.classwise, self.total = ClasswiseWrapper(MulticlassAccuracy(3, average=None)), SumMetric()

    module, other = Wrapped(), Wrapped()
    other.total.update(10.0)
    shared = SharedMetrics(module, lambda states: [states, metric_states(other)])
    for loaders_done in (1, 2):
        shared.begin()
        module.classwise.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
        shared.share(), shared.share()
        assert shared.merged()["total"][1]["sum_value"] == module.total.compute() == 10
        assert module.classwise.metric.fn.tolist() == [0, 0, loaders_done]
    module.classwise.reset()
    shared.begin()
    assert module.total.sum_value == 0 and module.classwise.metric.tp.sum() == 0


# ---- Samples, and calls in a step -------------------------------------------------------------------------------------------------


class Left(Ledger):
    """Logs the mean of what is in its batches, of which the loader's collate_fn leaves the zeros out."""

    def training_step(self, batch, batch_idx):
        self.log("t", tensor_of(batch).mean(), on_step=False, on_epoch=True)
        self.log("given", tensor_of(batch).mean(), on_step=False, on_epoch=True, batch_size=1)
        return self.w * tensor_of(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("v", tensor_of(batch).mean())


def tensor_of(batch):
    return batch if isinstance(batch, torch.Tensor) else batch[-1]


def not_zero(rows):
    return torch.stack([x for (x,) in rows if x != 0])


def timed(rows):
    """Time steps first, more of them in later batches; nothing is left out."""
    x = torch.stack([x for (x,) in rows])
    return [x.expand(2 + int(x[0]), len(rows)), x]


@pytest.mark.parametrize("plan", [{}, {"A": 2}, {"R": 2, "D": 2}], ids=str)
def test_an_average_weighs_by_the_samples_that_are_in_the_batches(plan):
    """Batches of 1, of 2 and 3, of 4 and 5, of 6 and 7: their mean is 4, the mean of the batches' means 3.625."""
    data = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, collate_fn=not_zero)
    metrics = fit(Left(), data, data, num_sanity_val_steps=0, **plan).callback_metrics
    assert metrics["t"] == metrics["v"] == 4 and metrics["given"] == (1 + 2.5 + 4.5 + 6.5) / 4
    data = DataLoader(TensorDataset(torch.arange(7.0)), batch_size=2, collate_fn=timed)
    assert make_trainer(**plan).validate(Left(), data, verbose=False)[0]["v"] == 3


def test_samples_are_those_that_were_drawn_if_anything_is_that_long_else_lightnings():
    one, two, five = torch.zeros(1, 7), torch.zeros(2, 5), torch.zeros(5, 2)
    for batch, drawn, samples in (
        (two, 2, 2),
        (one, 2, 1),
        ({"time": five, "x": two}, 2, 2),
        ([five, two], 3, 5),
        (((one[0], one[0]), ({"box": five}, {"box": five})), 2, 2),  # pictures and their boxes
        (torch.zeros(()), 1, 1),
        (["a", "b"], 4, 4),
        (two, None, 2),
    ):
        assert samples_in(batch, drawn) == samples
    with pytest.raises(Exception, match="batch_size"):
        samples_in(["a", "b"], None)


@pytest.mark.parametrize("plan", [{}, {"A": 2}, {"D": 2}], ids=str)
def test_of_several_calls_in_one_step_its_value_is_the_last_and_the_epochs_that_of_all(plan, tmp_path):
    class Twice(Ledger):
        def log_twice(self, prefix):
            for value in (1.0, 3.0):
                for kind in ("mean", "sum", "max"):
                    self.log(f"{prefix}{kind}", value / (1 + self.trainer.global_step), on_step=True, on_epoch=True, reduce_fx=kind)

        def training_step(self, batch, batch_idx):
            self.log_twice("")
            return super().training_step(batch, batch_idx)

        def on_after_backward(self):
            self.log_twice("hook ")

        def validation_step(self, batch, batch_idx):
            self.log("v", 1.0, on_step=True, on_epoch=True)
            self.log("v", 3.0, on_step=True, on_epoch=True)

    trainer = fit(Twice(), loader(4), loader(2), num_sanity_val_steps=0, log_every_n_steps=1, logger=csv_logger(tmp_path), **plan)
    rows = [row for row in csv_rows(tmp_path) if "mean_step" in row]
    A, updates = plan.get("A", 1), len(rows)
    assert updates == 4 / A
    for prefix, calls in (("", A), ("hook ", 1)):
        assert (
            [row[f"{prefix}mean_step"] for row in rows]
            == [row[f"{prefix}max_step"] for row in rows]
            == [3 / (k + 1) for k in range(updates)]
        )
        assert [row[f"{prefix}sum_step"] for row in rows] == [calls * 3 / (k + 1) for k in range(updates)]
        total = sum(4 / (k + 1) for k in range(updates))
        metrics = trainer.callback_metrics
        assert metrics[f"{prefix}mean_epoch"] == pytest.approx(total / 2 / updates) and metrics[f"{prefix}max_epoch"] == 3
        assert metrics[f"{prefix}sum_epoch"] == pytest.approx(calls * total)
    assert [row["v_step"] for row in csv_rows(tmp_path) if "v_step" in row] == [3, 3] and trainer.callback_metrics["v_epoch"] == 2


class Promising(Sampler):
    """Promises twice as many batches as it gives."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self):
        yield from ([k, k + 1] for k in range(0, self.samples, 2))

    def __len__(self):
        return self.samples


def test_what_an_evaluation_logs_is_told_however_its_loader_ends():
    class Mean(Ledger):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("v", batch[0].mean())

    data = TensorDataset(torch.arange(8.0))
    short, whole = DataLoader(data, batch_sampler=Promising(6)), DataLoader(data, batch_size=4)
    for loaders, options, expected in (
        ([short], {}, [2.5]),
        ([short, whole, short], {}, [2.5, 3.5, 2.5]),
        ([whole, short], {"limit_val_batches": 1}, [1.5, 0.5]),
        ([whole, short], {"limit_val_batches": 5}, [3.5, 2.5]),
    ):
        results = make_trainer(**options).validate(Mean(), loaders, verbose=False)
        assert [value for result in results for value in result.values()] == expected
