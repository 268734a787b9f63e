"""A process that dies ends the whole run, at once and by name; leftovers in the environment are never waited on."""

import os
import time
from pathlib import Path

import pytest
import warm

SCRIPT = str(Path(__file__).with_name("dying.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(how: str, *launcher: str, **environment: str) -> tuple[int, str, float]:
    """Run the script; returns status, output, and seconds until every process has let go of its output."""
    clean = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    paths = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    began = time.monotonic()
    done = warm.run([*launcher, SCRIPT, how], env=clean | paths | environment, merged=True, timeout=120, spares=2)
    return done.returncode, done.stdout, time.monotonic() - began


@pytest.mark.parametrize(
    ("how", "launcher", "words"),
    [
        ("kill", [], "process 1 of 2 ended by signal SIGKILL"),
        ("raise", [], "RuntimeError: what rank 1 died of"),
        ("kill", TORCHRUN, "SIGKILL"),
        ("raise", TORCHRUN, "RuntimeError: what rank 1 died of"),
    ],
    ids=["Lightning's launcher, SIGKILL", "Lightning's launcher, exception", "torchrun, SIGKILL", "torchrun, exception"],
)
def test_a_process_that_dies_ends_the_run_within_30_seconds_and_is_named(how, launcher, words):
    status, output, seconds = start(how, *launcher)
    assert status != 0 and "steps" not in output
    assert words in output
    assert seconds < 30 + 30  # the start of two processes on busy cores included


def test_leftovers_in_the_environment_are_not_waited_on():
    status, output, _ = start(
        "live", DEVICES="1", WORLD_SIZE="4", RANK="3", SLURM_NTASKS="4", SLURM_NTASKS_PER_NODE="4", SLURM_JOB_ID="7", SLURM_JOB_NAME="x"
    )
    assert status == 0 and "steps 10 processes 1" in output
    status, output, _ = start("live", LOCAL_RANK="0", WORLD_SIZE="2")
    assert status != 0 and "LOCAL_RANK=0 is set in the environment, but no MASTER_ADDR" in output
