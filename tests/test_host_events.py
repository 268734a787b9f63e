"""How many weight updates a host step may hold: events fall where they would with one update per host step."""

import re
from fractions import Fraction

import pytest
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint, WeightAveraging
from runs import Net, classes, csv_logger, csv_rows, fit, loader
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from lightning_ipu.loop.events import EventsPerEpoch, HostEvents, nearest_divisor, updates_between


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
        (HostEvents(16, 10, in_run=[("a checkpoint", 4, 4)]), 20, [4, 4, 2, 2, 4, 4]),
        (HostEvents(16, 10, in_epoch=[("a validation", 4)]), 20, [4, 4, 2, 4, 4, 2]),
        (HostEvents(16, 12, in_run=[("a checkpoint", 3, 3)], in_epoch=[("a validation", 4)]), 12, [3, 1, 2, 2, 1, 3]),
        (HostEvents(16, 10, before=[("a monitor", 5)]), 20, [4, 5, 1, 4, 5, 1]),
        (HostEvents(16, 10, in_run=[("weights", 1, 1)]), 3, [1, 1, 1]),
        (HostEvents(16, 10, in_run=[("a checkpoint", 7, 5)]), 20, [7, 3, 2, 5, 3]),
    ],
    ids=str,
)
def test_host_steps_end_where_something_is_due(events, updates, expected):
    assert host_steps(events, updates) == expected


@pytest.mark.parametrize(
    ("events", "line"),
    [
        (HostEvents(4, None), None),
        (HostEvents(4, 10, max_steps=100, in_run=[("a checkpoint", 4, 4)]), None),
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

    once_per_host_step = True

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


# -- frequencies per epoch ----------------------------------------------------------------------------------------------------

UPDATES = 50_000 // 64  # of an epoch of CIFAR-10 with a global batch of 64


@pytest.mark.parametrize(
    ("per_epoch", "epochs", "every", "warns"),
    [
        ("1", 6, UPDATES, False),
        ("2", 6, UPDATES, True),
        ("10", 6, 71, True),
        ("1/2", 6, 2 * UPDATES, False),
        ("1/3", 6, 3 * UPDATES, False),
        ("0", 6, None, False),
        ("1/49", 49, 49 * UPDATES, False),  # as floating-point numbers they do not divide
        ("2/3", 6, 2 * UPDATES, True),
        ("1/2", None, 2 * UPDATES, False),
    ],
)
def test_events_divide_epochs_as_documented(per_epoch, epochs, every, warns):
    found, remark = updates_between(Fraction(per_epoch), what="logs", updates_per_epoch=UPDATES, epochs=epochs, exact=True)
    assert found == every and (remark is not None) == warns
    if per_epoch == "10":
        assert remark == (
            "10 logs per epoch do not divide the 781 weight updates of an epoch evenly; the nearest number that does is taken: 11 per epoch,"
            " one every 71 weight updates"
        )


def test_a_frequency_that_cannot_be_names_itself_and_the_epochs():
    with pytest.raises(ValueError, match="^1/2 logs per epoch cannot be in 5 epochs: 5 is no multiple of 2$"):
        updates_between(Fraction(1, 2), what="logs", updates_per_epoch=UPDATES, epochs=5, exact=True)
    with pytest.raises(ValueError, match="2/3 logs per epoch of a run without a number of epochs: give 1/n"):
        updates_between(Fraction(2, 3), what="logs", updates_per_epoch=UPDATES, epochs=None)


def test_the_nearest_divisor_is_the_nearest_of_all_perfect_squares_included():
    for number in range(1, 145):
        divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
        for wanted in range(number + 3):
            nearest = nearest_divisor(number, Fraction(wanted))
            assert nearest in divisors and abs(nearest - wanted) == min(abs(divisor - wanted) for divisor in divisors)
    assert [nearest_divisor(number, Fraction(wanted)) for number, wanted in ((9, 3), (36, 6), (100, 10), (4, 2))] == [3, 6, 10, 2]


def test_every_frequency_gives_whole_updates_that_end_with_the_run():
    for updates in (1, 7, 12, 36):
        for epochs in range(1, 8):
            for per_epoch in (Fraction(1, 5), Fraction(1, 3), Fraction(2, 3), Fraction(1), Fraction(5, 2), Fraction(6)):
                every, _ = updates_between(per_epoch, what="checkpoints", updates_per_epoch=updates, epochs=epochs)
                assert (updates * epochs) % every == 0
                assert updates % every == 0 if per_epoch >= 1 else every % updates == 0  # none begins within an epoch and ends in another


@pytest.mark.parametrize("checkpoints", [None, "0", "1", "1/3"])
@pytest.mark.parametrize(
    ("logs", "updates", "logged"),
    [
        ("1", 11, 6),
        ("2", 11, 6),  # as 11 is prime
        ("10", 11, 66),
        ("1/2", 11, 3),
        ("1/3", 11, 2),
        ("0", 11, 1),
    ],
)
def test_a_run_logs_as_often_as_it_is_told_whatever_its_checkpoints(logs, updates, logged, checkpoints, tmp_path):
    module = Ends()
    events = EventsPerEpoch(logs=logs, checkpoints=checkpoints)
    fit(module, loader(classes(updates)), D=16, max_epochs=6, callbacks=events, logger=csv_logger(tmp_path))
    rows = [int(row["step"]) + 1 for row in csv_rows(tmp_path) if "loss_step" in row]
    period = 6 * updates // logged
    assert rows == list(range(period, 6 * updates + 1, period))
    assert set(rows) <= set(module.ends) and all(updates * epoch in module.ends for epoch in range(1, 7))


@pytest.mark.parametrize(
    ("validations", "epochs"), [("2", [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]), ("1/2", [2, 4]), ("1", [1, 2, 3, 4]), ("0", [])]
)
def test_validations_per_epoch(validations, epochs):
    class Validated(Net):
        def on_validation_start(self):
            self.validated.append(self.trainer.global_step / 6)

    module = Validated()
    module.validated = []
    options = {"max_epochs": 4, "num_sanity_val_steps": 0, "callbacks": EventsPerEpoch(validations=validations)}
    fit(module, loader(classes(6)), loader(classes(2)), D=16, **options)
    assert module.validated == epochs


def test_what_cannot_be_is_refused_before_the_first_update():
    module = Ends()
    with pytest.raises(ValueError, match="1/2 logs per epoch cannot be in 5 epochs"):
        fit(module, loader(classes(4)), max_epochs=5, callbacks=EventsPerEpoch(logs="1/2"))
    with pytest.raises(ValueError, match="first_checkpoint_epoch=3 lies after the last of 2 epochs.*of the 1 checkpoints per epoch"):
        fit(module, loader(classes(4)), max_epochs=2, callbacks=EventsPerEpoch(checkpoints=1, first_checkpoint_epoch=3))
    with pytest.raises(ValueError, match="logs='-1' per epoch must be a number of at least 0 or a fraction"):
        EventsPerEpoch(logs="-1")
    with pytest.raises(ValueError, match="first_checkpoint_epoch=2 needs checkpoints per epoch"):
        EventsPerEpoch(first_checkpoint_epoch=2)
    assert module.ends == []


@pytest.mark.parametrize(
    ("options", "epochs", "expected"),
    [
        ({"checkpoints": "1/3", "first_checkpoint_epoch": 2}, 5, [2, 5]),
        ({"checkpoints": "1", "first_checkpoint_epoch": 4}, 6, [4, 5, 6]),  # the first may lie later than one is far from the next
        ({"checkpoints": "1/3"}, 7, [7]),
        ({"checkpoints": "2", "first_checkpoint_epoch": 0.5}, 2, [0.5, 1, 1.5, 2]),
        ({"checkpoints": "1", "first_checkpoint_epoch": 3}, 3, [3]),
        ({"checkpoints": "0"}, 2, []),
    ],
)
def test_when_checkpoints_are_due(options, epochs, expected):
    events = EventsPerEpoch(**options)
    fit(Net(), loader(classes(4)), D=16, max_epochs=epochs, callbacks=events)
    assert [update / 4 for update in range(4 * epochs + 1) if events.checkpoint_due(update)] == expected
