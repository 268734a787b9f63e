"""A run of two processes of which the second dies at the third weight update: dying.py HOW, HOW being kill, raise or live."""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import loaded  # noqa: F401
import torch
from runs import Net, classes, fit, loader


class Dying(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and self.trainer.global_step == 2:
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[1] == "raise":
                raise RuntimeError("what rank 1 died of")


if __name__ == "__main__":
    torch.set_num_threads(1)
    module = Dying()
    trainer = fit(module, loader(classes(80), 4), devices=int(os.environ.get("DEVICES", "2")), R=2)
    print("steps", trainer.global_step, "processes", trainer.world_size)
