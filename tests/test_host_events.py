"""How many weight updates a host step may hold: events fall where they would with one update per host step."""

import re

import pytest
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint, WeightAveraging
from runs import Net, classes, csv_logger, csv_rows, fit, loader
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from lightning_ipu.host_events import HostEvents


def host_steps(events: HostEvents, updates: int) -> list[int]:
    """The host steps of a run of one epoch after another."""
    sizes, done = [], 0
    while done < updates:
        sizes.append(events.updates_until_due(run_update=done, epoch_update=done % (events.updates_per_epoch or 10**9)))
        done += sizes[-1]
    return sizes


@pytest.mark.parametrize(
    ("events", "updates", "expected"),
    [
        (HostEvents(4, None), 10, [4, 4, 4]),
        (HostEvents(4, 10), 20, [4, 4, 2, 4, 4, 2]),
        (HostEvents(16, 5), 10, [5, 5]),
        (HostEvents(4, 10, max_steps=7), 7, [4, 3]),
        (HostEvents(16, 10, in_run=[("a checkpoint", 4)]), 20, [4, 4, 2, 2, 4, 4]),
        (HostEvents(16, 10, in_epoch=[("a validation", 4)]), 20, [4, 4, 2, 4, 4, 2]),
        (HostEvents(16, 12, in_run=[("a checkpoint", 3)], in_epoch=[("a validation", 4)]), 12, [3, 1, 2, 2, 1, 3]),
        (HostEvents(16, 10, before=[("a monitor", 5)]), 20, [4, 5, 1, 4, 5, 1]),
        (HostEvents(16, 10, in_run=[("weights", 1)]), 3, [1, 1, 1]),
    ],
    ids=str,
)
def test_host_steps_end_where_something_is_due(events, updates, expected):
    assert host_steps(events, updates) == expected


@pytest.mark.parametrize(
    ("events", "line"),
    [
        (HostEvents(4, None), None),
        (HostEvents(4, 10, max_steps=100, in_run=[("a checkpoint", 4)]), None),
        (HostEvents(16, 5), "device_iterations=16: host steps hold at most 5, since an epoch is due after every 5 weight updates"),
        (HostEvents(16, 50, in_epoch=[("a validation", 4)]), "at most 4, since a validation"),
        (HostEvents(16, None, max_steps=3), r"at most 3, since the run \(max_steps\)"),
    ],
    ids=str,
)
def test_a_reduction_is_said_in_one_line(events, line):
    if line is None:
        assert events.reduction is None
    else:
        assert re.search(line, events.reduction)


class Ends(Net):
    """Notes after how many weight updates Lightning's loop was returned to."""

    def __init__(self, **options):
        super().__init__(**options)
        self.ends = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ends.append(self.trainer.global_step)


def plateau(module, optimizer):
    return {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "interval": "step", "monitor": "loss"}


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, [8, 10, 18, 20]),
        ({"max_steps": 13, "max_epochs": -1}, [8, 10, 13]),
        ({"val_check_interval": 3}, [3, 6, 9, 10, 13, 16, 19, 20]),
        ({"val_check_interval": 0.25}, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
        ({"val_check_interval": 7, "check_val_every_n_epoch": None}, [7, 10, 14, 20]),
        ({"val_check_interval": 3, "limit_val_batches": 0}, [8, 10, 18, 20]),
        ({"callbacks": lambda: WeightAveraging()}, list(range(1, 21))),
        ({"callbacks": lambda: LearningRateMonitor(), "log_every_n_steps": 6}, [5, 10, 11, 17, 20]),
        ({"callbacks": lambda: LearningRateMonitor("epoch"), "log_every_n_steps": 6}, [8, 10, 18, 20]),
        ({"limit_train_batches": 9}, [8, 9, 17, 18]),
    ],
    ids=str,
)
def test_a_trainers_own_events_end_host_steps(options, ends, tmp_path):
    options = {name: value() if callable(value) else value for name, value in options.items()}
    module = Ends()
    fit(
        module,
        loader(classes(10)),
        loader(classes(4)),
        D=8,
        **{"max_epochs": 2, "logger": csv_logger(tmp_path), "num_sanity_val_steps": 0, **options},
    )
    assert module.ends == ends


@pytest.mark.parametrize("D", [1, 16])
def test_checkpoints_every_n_updates_and_a_plateau_schedule_per_update_do_not_wait_for_the_host_step(D, tmp_path):
    checkpoints = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    module = Ends()
    fit(module, loader(classes(20), 2), D=D, max_epochs=2, callbacks=checkpoints, enable_checkpointing=True)
    assert sorted(path.stem for path in tmp_path.glob("*.ckpt")) == [f"step={k}" for k in (12, 16, 20, 4, 8)]

    module = Ends(schedule=plateau)
    fit(module, loader(classes(20), 2), R=2, D=D)
    assert module.ends == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("D", [1, 4, 16])
def test_the_learning_rate_monitor_shows_the_same_rates_for_every_d(D, tmp_path):
    def halving(module, optimizer):
        return {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}

    fit(
        Net(schedule=halving),
        loader(classes(24), 1),
        R=2,
        D=D,
        logger=csv_logger(tmp_path),
        log_every_n_steps=3,
        callbacks=LearningRateMonitor(),
    )
    rates = [(row["step"], row["lr-SGD"]) for row in csv_rows(tmp_path) if "lr-SGD" in row]
    assert rates == [(k, pytest.approx(0.1 * 0.5**k)) for k in (2, 5, 8, 11)]


def test_a_reduction_is_announced_once(caplog):
    with caplog.at_level("INFO", logger="pytorch_lightning.utilities.rank_zero"):
        fit(Net(), loader(classes(6)), D=16, max_epochs=3)
    assert sum("device_iterations=16" in message for message in caplog.messages) == 1
