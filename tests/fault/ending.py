"""Runs over loader workers that end in the middle, each in a process of its own, forked from one that has loaded everything.

ending.py CASE...: a case is WAY:WORKERS:PERSISTENT[:FAULT training|FAULT validation], and prints `CASE STATUS SECONDS`, the time from the end's cause to the process's end.
With DEVICES=2 in the environment one case runs in two processes, started as any script's are.
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
from torch.utils.data import Dataset

LIMIT = 15


class Samples(Dataset):
    """Samples of which one cannot be read, or keeps a worker busy for ever."""

    def __init__(self, *, fault: str | None = None) -> None:
        self.samples, self.fault = classes(64), fault

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        if self.fault == "damaged" and index == 40:
            cause()
            raise ValueError("sample 40 is damaged")
        if self.fault == "busy" and index == 40:
            time.sleep(1000)
        return self.samples[index]


def cause() -> None:
    """Note when the cause of the end came up."""
    if "CAUSE" in os.environ:
        Path(os.environ["CAUSE"]).write_text(repr(time.time()))


class Ending(Net):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def end(self, place: str) -> None:
        how, _, where = self.way.partition(" in ")
        rank = int(os.environ.get("RANK_THAT_ENDS", self.trainer.world_size - 1))
        if where == place and self.trainer.global_step >= 3 and self.trainer.global_rank == rank:
            cause()
            if how == "exit":
                sys.exit(3)
            if how == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            elif how == "group":  # as `timeout` does it, so that this process may get two
                os.kill(os.getpid(), signal.SIGTERM)
                os.killpg(0, signal.SIGTERM)
            else:
                raise {"error": ValueError, "interrupt": KeyboardInterrupt}[how]("the end")

    def training_step(self, batch, batch_idx):
        self.end("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.end("validation_step")
        return super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.end("hook")


def run(case: str) -> None:
    way, workers, persistent, *faults = case.split(":")
    options = {"num_workers": int(workers), "persistent_workers": persistent == "persistent"}
    samples = {
        name: Samples(fault=next((fault.split()[0] for fault in faults if fault.endswith(name)), None))
        for name in ("training", "validation")
    }
    devices = int(os.environ.get("DEVICES", "1"))
    trainer = fit(
        Ending(way), loader(samples["training"], 4, **options), loader(samples["validation"], 4, **options), R=devices, devices=devices, max_epochs=2,
        val_check_interval=0.5, num_sanity_val_steps=0,
    )  # fmt: skip
    print("ended well after", trainer.global_step)


def status_of(pid: int) -> int | None:
    begun = time.monotonic()
    while time.monotonic() - begun < LIMIT:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    mine = None
    for case in sys.argv[1:] if "DEVICES" not in os.environ else []:
        note = Path(f"{os.environ['CAUSE']}.{os.getpid()}")
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.environ["CAUSE"], mine = str(note), case
            break
        status = status_of(pid)
        print(case, status, f"{time.time() - float(note.read_text()):.1f}" if note.exists() else "never", sep="\t", flush=True)
        note.unlink(missing_ok=True)
    if mine or "DEVICES" in os.environ:
        run(mine or sys.argv[1])  # an error goes the way of every script's: nobody catches it
