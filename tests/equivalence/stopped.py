"""Runs of two processes of which one receives another signal or decides in a hook, and the process groups that several runs make."""

import signal

import torch
from pytorch_lightning.utilities.exceptions import SIGTERMException
from runs import Net, classes, loader, make_trainer
from torch.nn import functional as F

PLANS = {"replicas": {"R": 2}, "stages": {"A": 2, "pipeline_splits": ["network.1"]}}


class Stopped(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 3:  # as a handler would
            self.trainer.strategy.progress.stop_signal = (signal.SIGINT, signal.SIGTERM)[self.trainer.global_rank]


def run(processes: int) -> dict[str, tuple[list[int], list[int], list[int]]]:
    """For each plan: the signal that each process took to be the run's, its weight updates, and how many groups there were from run to run."""
    results = {}
    for name, plan in PLANS.items():
        groups = []
        for _ in range(2):
            module, trainer = Stopped(), make_trainer(devices=processes, **plan)
            try:
                trainer.fit(module, loader(classes(64), 4))
            except SIGTERMException as end:
                heard = trainer.strategy._processes.gathered(end.code - 128), trainer.strategy._processes.gathered(trainer.global_step)
            trainer.validate(module, loader(classes(8), 4), verbose=False)
            groups.append(len(torch.distributed.distributed_c10d._world.pg_map))
        results[name] = *heard, groups
    return results


class Deciding(Net):
    """Decides in one hook, in the last process alone: to stop, to skip the rest of the first epoch, or that it is time to validate."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook, self.ran = hook, []

    def _decide(self, hook: str, epoch: int, step: int) -> int | None:
        trainer = self.trainer
        if trainer.sanity_checking or (trainer.current_epoch, self.global_step) != (epoch, step):
            return None
        if trainer.global_rank == trainer.world_size - 1:
            trainer.should_stop |= hook == self.hook
            if self.hook == "a clock" and hook == "on_train_batch_start":  # that is an hour ahead
                trainer._last_val_time -= 3600
            return -1 if self.hook == "return -1" and hook == "on_train_batch_start" else None
        return None

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_start(self):
        self._decide("on_train_start", 0, 0)

    def on_train_epoch_start(self):
        self._decide("on_train_epoch_start", 1, 3)

    def on_train_batch_start(self, batch, batch_idx):
        return self._decide("on_train_batch_start", 0, 1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self._decide("on_train_batch_end", 0, 2)

    def validation_step(self, batch, batch_idx):
        if self.global_step not in self.ran:
            self.ran.append(self.global_step)

    def on_validation_end(self):
        self._decide("on_validation_end", 0, 3)

    def on_train_epoch_end(self):
        self._decide("on_train_epoch_end", 0, 3)


DECISIONS = {  # for epochs of three weight updates: updates in all, and after which of them a validation ran
    "": (9, [3, 6, 9]),
    "return -1": (7, [4, 7]),  # of the first epoch one update; a skipped epoch does not validate
    "a clock": (9, [2]),
    "on_train_start": (0, []),
    "on_train_epoch_start": (3, [3]),
    "on_train_batch_start": (2, [2]),
    "on_train_batch_end": (2, [2]),
    "on_validation_end": (3, [3]),
    "on_train_epoch_end": (3, [3]),
}


def decide(processes: int, plan: str, hook: str) -> list[tuple[int, list[int]]]:
    """In every process: weight updates, and after which of them it validated."""
    options = {**PLANS[plan], "val_check_interval": "00:01:00:00" if hook == "a clock" else 1.0}
    module, trainer = Deciding(hook), make_trainer(devices=processes, max_epochs=3, num_sanity_val_steps=0, **options)
    trainer.fit(module, loader(classes(24), 4), loader(classes(16), 4))
    ran = trainer.global_step, module.ran
    return [ran] if processes == 1 else trainer.strategy._processes.gathered(ran)
