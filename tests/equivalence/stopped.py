"""Runs of two processes that receive different signals in one weight update, and the process groups that several runs make."""

import signal

import torch
from pytorch_lightning.utilities.exceptions import SIGTERMException
from runs import Net, classes, loader, make_trainer

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
