"""A run of two processes that no broken connection ends: lost.py HOW.

HOW is one of early: the second process leaves, with status 0, before the two have met. stuck: the first is killed while the
second is in its own Python; killed: while it waits for the first. exit: the second leaves by os._exit in training_step, without a
traceback. late: it fails after all that the two do together.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import loaded  # noqa: F401
import torch
from runs import Net, classes, fit, loader


class Lost(Net):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 2:
            if sys.argv[1] in ("stuck", "killed"):
                if self.trainer.global_rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                if sys.argv[1] == "stuck":
                    time.sleep(100)
            if sys.argv[1] == "exit" and self.trainer.global_rank == 1:
                os._exit(1)
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        if sys.argv[1] == "late" and self.trainer.global_rank == 1:
            raise ValueError("too late")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "early" and os.environ.get("LOCAL_RANK") == "1":
        os._exit(0)
    trainer = fit(Lost(), loader(classes(80), 4), devices=2, R=2)
    print("steps", trainer.global_step)
