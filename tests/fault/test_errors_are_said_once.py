"""An error is said once, in one line, however many processes meet it or lose one another through it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TINY = "--dataset SAMPLE --size 8 --precision 32.32 --batch-size 16 --replication-factor 2 --limit-train-batches 2".split()


def run(folder: Path, *words: str, launcher: list[str] = TORCHRUN, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    command = [sys.executable, *launcher, "-m", "resnet_ipu", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def errors(done: subprocess.CompletedProcess) -> list[str]:
    """The lines of errors and the heads of tracebacks, torchrun's own left out."""
    ours = done.stderr.partition("torch.distributed.elastic.multiprocessing.errors")[0].partition('/torch/distributed/run.py"')[0]
    return [line for line in ours.splitlines() if "error: " in line or "Error: " in line]


@pytest.mark.parametrize("words", [["--bogus"], [*TINY, "--limit-train-batches", "1"]], ids=["wrong option", "refused by the strategy"])
def test_what_all_processes_refuse_is_printed_by_the_first(words, tmp_path):
    done = run(tmp_path, *words)
    assert done.returncode != 0 and len(errors(done)) == 1 and "resnet_ipu: error: " in errors(done)[0], done.stderr


def test_help_is_printed_once(tmp_path):
    done = run(tmp_path, "--help")
    assert done.returncode == 0 and done.stdout.count("usage:") == 1
