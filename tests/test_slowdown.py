"""A run that has become twice as slow says so once, with the cause that this process can read."""

import os
import re
import subprocess
import sys
import time
import warnings

import pytest
import warm
from runs import Ledger, fit, loader

from lightning_ipu.command.slowdown import SlowdownWatch, Usage, explanation


class Slows(Ledger):
    """Takes 2 ms for each of the first weight updates, and 10 ms for those from a number on."""

    def __init__(self, slow_from: int) -> None:
        super().__init__()
        self.slow_from = slow_from

    def training_step(self, batch, batch_idx):
        time.sleep(0.002 if batch_idx < self.slow_from else 0.010)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("slow_from", "warned"), [(20, 1), (60, 0)])
def test_training_that_becomes_five_times_slower_is_said_once(slow_from, warned):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(Slows(slow_from), loader(60), callbacks=[SlowdownWatch(seconds=0.03)])
    words = [str(warning.message) for warning in said if "times slower" in str(warning.message)]
    assert len(words) == warned
    assert all(2 < float(re.search(r"([\d.]+) times", line)[1]) < 7 for line in words)


def test_the_cause_is_told_apart_by_what_the_process_used():
    best = Usage(wall=10, cpu=20, waiting=0.1, samples=1000)
    assert "other programs use the cores" in explanation(Usage(wall=10, cpu=10, waiting=9, samples=400), best)
    assert "waits more, for its data" in explanation(Usage(wall=10, cpu=6, waiting=0.1, samples=400), best)
    line = explanation(Usage(wall=10, cpu=20, waiting=0.1, samples=400), best)
    assert "computes as much as before" in line and "2.5 times slower than it was (40 samples/s, before 100)" in line


_BUSY = """
import os, time
os.sched_setaffinity(0, {int(os.environ["CORE"])})
end = time.monotonic() + 20
print("ready", flush=True)
while time.monotonic() < end: pass
"""
_MEASURED = """
import os, time
os.sched_setaffinity(0, {int(os.environ["CORE"])})
from lightning_ipu.command.slowdown import Usage
before, end = Usage.now(0), time.monotonic() + 0.5
while time.monotonic() < end: pass
used = Usage.now(0).since(before)
print(used.waiting / used.wall)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the system does not count how long a thread waits for a core")
def test_a_process_that_shares_its_core_is_seen_to_wait_for_it():
    environment = {**os.environ, "CORE": str(min(os.sched_getaffinity(0)))}
    with subprocess.Popen([sys.executable, "-c", _BUSY], env=environment, stdout=subprocess.PIPE, text=True) as busy:
        try:
            assert busy.stdout.readline() == "ready\n"
            done = warm.run(["-c", _MEASURED], env=environment, timeout=60)
        finally:
            busy.kill()
    assert float(done.stdout) > 0.2
