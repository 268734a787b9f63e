"""What had happened before a checkpoint does not happen again, what had not, does, with its values: every hook, row, rate, state and file."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping, LearningRateMonitor
from pytorch_lightning.loggers.logger import Logger
from runs import blocks, classes, equal_states, loader, make_trainer
from torch.nn import functional as F

BATCH = ["on_train_batch_start", "on_train_batch_end"]
VALIDATION = ["on_validation_start", "on_validation_epoch_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"]
NOTED = ["on_train_epoch_start", *BATCH, *VALIDATION, "on_train_epoch_end"]
UNDER_WAY = VALIDATION[:-1]  # a checkpoint of these stands before the whole validation


def note(notes, who, hook, trainer, arguments) -> None:
    """Write down a call of a hook with all that it could have read."""
    if trainer.sanity_checking:
        return
    values = {name: round(float(value), 6) for name, value in trainer.callback_metrics.items()}
    batch = [arguments[-1], arguments[-2][2].tolist()] if hook in BATCH else [arguments[2]] if hook == VALIDATION[2] else []
    output = round(float(arguments[0]["loss"]), 6) if hook == BATCH[1] else None
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    place = trainer.global_step, trainer.current_epoch, trainer.should_stop, trainer.lightning_module.training
    notes.append((who, hook, place, rate, values, batch, output))


class Noter(pl.Callback):
    def __init__(self, notes, who, heard) -> None:
        self.notes, self.who, self.heard = notes, who, heard
        for hook in NOTED:
            setattr(self, hook, partial(self._note, hook))

    @property
    def state_key(self):
        return self.who

    def _note(self, hook, trainer, module, *arguments) -> None:
        self.heard += not trainer.sanity_checking
        note(self.notes, self.who, hook, trainer, arguments)

    def state_dict(self):
        return {"heard": self.heard}

    def load_state_dict(self, state):
        self.heard = state["heard"]


class Saver(pl.Callback):
    """Saves in every hook; notes which of the notes had been written by then."""

    def __init__(self, folder, notes) -> None:
        self.folder, self.notes, self.saves, self.validation = folder, notes, [], 0
        for hook in NOTED if folder else []:
            setattr(self, hook, partial(self._save, hook))

    def _save(self, hook, trainer, module, *arguments) -> None:
        if hook == VALIDATION[0]:  # of which one callback has heard already
            self.validation = max(number for number, noted in enumerate(self.notes) if noted[:2] == ("first", hook))
        path = self.folder / f"{len(self.saves)}.ckpt"
        trainer.save_checkpoint(path)
        self.saves.append((path, hook, trainer.global_step, self.validation if hook in UNDER_WAY else len(self.notes)))


class LateSaver(Saver, Checkpoint):
    """A saver whose `on_train_epoch_end` comes after the module's."""


class Rows(Logger):
    name = version = ""

    def __init__(self, notes) -> None:
        super().__init__()
        self.notes = notes

    def log_hyperparams(self, *arguments):
        pass

    def log_metrics(self, metrics, step=None):
        self.notes.append(("row", step, {name: round(float(value), 6) for name, value in metrics.items()}))


class Noting(pl.LightningModule):
    def __init__(self, notes, plateau) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network, self.notes, self.plateau = blocks(norm=True, dropout=0.2), notes, plateau
        for hook in NOTED:
            setattr(self, hook, partial(self._note, hook))

    def _note(self, hook, *arguments):
        note(self.notes, "module", hook, self.trainer, arguments)
        if hook in (NOTED[0], BATCH[1], VALIDATION[3], NOTED[-1]):
            self.log(f"of {hook}", float(self.trainer.global_step), on_step=False, on_epoch=True)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "size": len(batch[0])}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.network(batch[0]), batch[1]) + self.trainer.global_step)  # which becomes worse

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": self.plateau, "monitor": "val_loss", "strict": False},
        }


def run(*, folder=None, saver=Saver, ckpt_path=None, plateau="epoch", D=1, **options):
    """A fit of three epochs of 6 updates under all kinds of callbacks; returns the trainer, the saver and the notes."""
    notes: list = []
    saver = saver(folder, notes)
    module = Noting(notes, plateau)
    callbacks = [
        Noter(notes, "first", 0),
        LearningRateMonitor(),
        EarlyStopping("val_loss", patience=1, strict=False),
        saver,
        Noter(notes, "last", 0),
    ]
    plan = {"A": 2, "log_every_n_steps": 2, "num_sanity_val_steps": 0, "max_epochs": 3, **options}
    plan["enable_checkpointing"] = isinstance(saver, Checkpoint)
    trainer = make_trainer(D=D, callbacks=callbacks, logger=Rows(notes), **plan)
    trainer.fit(module, loader(classes(25), 2, shuffle=True), loader(classes(7, seed=6), 4), ckpt_path=ckpt_path)
    return trainer, saver, notes


def ends(trainer):
    """States of all callbacks, of the optimizer and of its schedule."""
    states = [(callback.state_key, callback.state_dict()) for callback in trainer.callbacks]
    return repr((states, trainer.lr_scheduler_configs[0].scheduler.state_dict(), trainer.optimizers[0].state_dict()))


@pytest.mark.parametrize(
    ("saver", "options"),
    [
        (Saver, {"D": 3}),
        (LateSaver, {"check_val_every_n_epoch": 2}),
        (LateSaver, {"D": 3, "val_check_interval": 0.5}),
        (Saver, {"plateau": "step", "val_check_interval": 2}),
        (Saver, {"D": 3, "check_val_every_n_epoch": None, "val_check_interval": 4, "max_steps": 16}),
        (LateSaver, {"D": 3, "limit_val_batches": 0}),
    ],
    ids=str,
)
def test_from_a_checkpoint_of_any_hook_the_rest_happens_once_and_as_it_would_have(saver, options, tmp_path):
    whole, saves, notes = run(folder=tmp_path, saver=saver, **options)
    places = {}
    for save in saves.saves:  # of the many, one of each kind of place
        places.setdefault((save[1], save[2] % 6 == 0), save)
    for path, hook, step, noted in places.values():
        again, _, rest = run(ckpt_path=path, saver=saver, **options)
        place = f"{hook} after update {step}"
        expected = notes[noted:]
        for number, (new, old) in enumerate(zip(rest, expected, strict=False)):
            assert new == old, (place, number)
        assert len(rest) == len(expected), place
        if hook not in UNDER_WAY:
            assert ends(again) == ends(whole), place
        assert equal_states(again.lightning_module, whole.lightning_module), place
        assert (again.global_step, again.current_epoch, again.should_stop) == (whole.global_step, whole.current_epoch, whole.should_stop)
