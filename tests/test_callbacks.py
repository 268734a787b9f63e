"""Lightning's own callbacks, every one: under host steps of several updates they do what they do in stock Lightning, or are refused."""

import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from runs import Net, classes, csv_logger, csv_rows, equal_states, fit, loader, make_trainer

from lightning_ipu.plan import PlanError

TABLE = Path(__file__).parents[1] / "docs" / "callbacks.md"


class Tunable(Net):
    """With a rate to be found, a backbone to be frozen, and a loss that leaps up in the seventh step of an epoch where asked."""

    def __init__(self):
        super().__init__()
        self.lr, self.leaps = 0.1, False
        self.backbone = self.network[0]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1e6 if self.leaps and batch_idx == 6 else loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=0.9)


class Freezing(callbacks.BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.network[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.network[0], optimizer, lr=0.01)


class Stats(callbacks.DeviceStatsMonitor):
    """Without psutil there are no figures of a CPU: one stands for them."""

    def setup(self, trainer, pl_module, stage):
        pass

    def _get_and_log_device_stats(self, trainer, key):
        if trainer._logger_connector.should_update_logs:
            trainer.logger.log_metrics({f"stats {key}": 1.0}, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


class Bar(callbacks.ProgressBar):
    """Notes how far it was told the epoch is."""

    def __init__(self):
        super().__init__()
        self.told = []

    def disable(self):
        pass

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.told.append(batch_idx + 1)


class Watching(pl.Callback):
    def __init__(self):
        self.updates = []

    def on_train_batch_end(self, trainer, *_):
        self.updates.append(trainer.global_step)


def rows_with(folder, part):
    return [(row["step"], *sorted(name for name in row if part in name)) for row in csv_rows(folder) if any(part in name for name in row)]


def files(folder, _, trainer):
    return sorted((path.name, torch.load(path, weights_only=True)["global_step"]) for path in folder.rglob("*.ckpt"))


def lambdas(seen):
    made = callbacks.LambdaCallback(on_train_batch_end=lambda trainer, *_: seen.append(trainer.global_step))
    made.seen = seen
    return made


# For each callback that is honoured: how to make it, and what to compare with stock Lightning beside the weights.
HONOURED = {
    "BackboneFinetuning": (lambda _: callbacks.BackboneFinetuning(1, verbose=False), None),
    "BaseFinetuning": (lambda _: Freezing(), None),
    "Callback": (lambda _: Watching(), lambda folder, callback, trainer: callback.updates),
    "DeviceStatsMonitor": (lambda _: Stats(), lambda folder, *_: rows_with(folder, "stats on_train")),
    "EMAWeightAveraging": (lambda _: callbacks.EMAWeightAveraging(decay=0.5), None),
    "EarlyStopping": (
        lambda _: callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0),
        lambda folder, callback, trainer: (callback.stopped_epoch, trainer.global_step),
    ),
    "LambdaCallback": (lambda _: lambdas([]), lambda folder, callback, trainer: callback.seen),
    "LearningRateFinder": (
        lambda _: callbacks.LearningRateFinder(num_training_steps=8),
        lambda folder, callback, trainer: callback.optimal_lr.results["lr"],
    ),
    "LearningRateMonitor": (lambda _: callbacks.LearningRateMonitor("step"), lambda folder, *_: rows_with(folder, "lr-")),
    "ModelCheckpoint": (lambda folder: callbacks.ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1), files),
    "ModelPruning": (lambda _: callbacks.ModelPruning("l1_unstructured", amount=0.3), None),
    "ModelSummary": (lambda _: callbacks.ModelSummary(max_depth=1), None),
    "OnExceptionCheckpoint": (lambda folder: callbacks.OnExceptionCheckpoint(folder), files),
    "RichModelSummary": (lambda _: callbacks.RichModelSummary(max_depth=1), None),
    "SpikeDetection": (
        lambda folder: callbacks.SpikeDetection(exclude_batches_path=folder),
        lambda folder, callback, _: callback.bad_batches,
    ),
    "ThroughputMonitor": (
        lambda _: callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2),
        lambda folder, callback, trainer: (dict(callback._samples), rows_with(folder, "train|device/batches_per_sec")),
    ),
    "Timer": (lambda _: callbacks.Timer(duration={"hours": 1}), None),
    "WeightAveraging": (lambda _: callbacks.WeightAveraging(), None),
}
REFUSED = {
    "BatchSizeFinder": lambda: callbacks.BatchSizeFinder(),
    "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler({0: 2}),
    "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(0.01),
}
ELSEWHERE = {"BasePredictionWriter", "Checkpoint", "ProgressBar", "RichProgressBar", "TQDMProgressBar"}  # the tests below


def test_every_public_callback_of_lightning_stands_in_the_table_and_is_tried_here():
    named = set(callbacks.__all__)
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", TABLE.read_text().partition("## Lightning's own callbacks")[2], flags=re.MULTILINE)
    assert {name for name, _ in rows} == named == HONOURED.keys() | REFUSED.keys() | ELSEWHERE
    for name, says in rows:
        assert says.startswith("refused") == (name in REFUSED), name


@pytest.mark.parametrize("name", list(HONOURED))
def test_a_callback_does_under_host_steps_of_several_updates_what_it_does_in_stock_lightning(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, look = HONOURED[name]

    def run(folder, **options):
        callback, module = make(folder), Tunable()
        module.leaps = name == "SpikeDetection"
        try:
            trainer = fit(
                module,
                loader(classes(20), 2),
                loader(classes(4), 2),
                callbacks=callback,
                logger=csv_logger(folder),
                log_every_n_steps=4,
                max_epochs=3,
                num_sanity_val_steps=0,
                enable_checkpointing=isinstance(callback, callbacks.Checkpoint),
                default_root_dir=folder,
                **options,
            )
        except RuntimeError as error:
            assert name == "SpikeDetection" and "spike detected in batch 6" in str(error)
            trainer = None
        return module, look and look(folder, callback, trainer)

    (ours, seen), (theirs, expected) = run(tmp_path / "ours", D=4), run(tmp_path / "stock", stock=True)
    assert equal_states(ours, theirs) and seen == expected
    assert seen or look is None or name == "OnExceptionCheckpoint"


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_callback_that_changes_the_plan_is_refused(name):
    with pytest.raises((PlanError, MisconfigurationException), match=name):
        fit(Net(), loader(classes(8), 2), callbacks=REFUSED[name]())


@pytest.mark.parametrize("plan", [{"A": 2}, {"R": 2}], ids=str)
@pytest.mark.parametrize("name", ["SpikeDetection", "ThroughputMonitor"])
def test_a_callback_that_would_see_one_micro_batch_of_several_is_refused(name, plan, tmp_path):
    module = Net()
    with pytest.raises(PlanError, match=f"the callback {name} would see only one of the 2 micro-batches of a weight update"):
        fit(module, loader(classes(8), 2), callbacks=HONOURED[name][0](tmp_path), logger=csv_logger(tmp_path), **plan)
    assert not module.seen


@pytest.mark.parametrize("kind", [Bar, callbacks.TQDMProgressBar, callbacks.RichProgressBar])
def test_a_progress_bar_shows_the_whole_epoch_in_host_steps(kind):
    bar = kind()
    ends = []

    def note(trainer, *_):
        if kind is callbacks.TQDMProgressBar:
            ends.append(bar.train_progress_bar.n)
        elif kind is callbacks.RichProgressBar:
            ends.append(bar.progress.tasks[bar.train_progress_bar_id].completed)
        else:
            ends.append(bar.told[-1])

    after = callbacks.LambdaCallback(on_train_epoch_end=note)
    fit(Net(), loader(classes(24), 2), R=2, A=2, D=2, max_epochs=2, callbacks=[bar, after], enable_progress_bar=True)
    assert ends == [12, 12] and "on_train_batch_end" not in vars(bar)
    if kind is Bar:
        assert bar.told == [8, 12, 8, 12]


def test_predictions_are_written_as_in_stock_lightning():
    class Writer(callbacks.BasePredictionWriter):
        def __init__(self):
            super().__init__("batch_and_epoch")
            self.batches = []

        def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            self.batches.append((batch_idx, batch_indices, prediction.tolist()))

        def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
            self.epoch = [rows.tolist() for rows in predictions], batch_indices

    def written(**options):
        writer = Writer()
        make_trainer(callbacks=writer, **options).predict(Net(), loader(classes(9), 4))
        return writer.batches, writer.epoch

    assert written(R=2, A=2, D=4) == written(stock=True)
