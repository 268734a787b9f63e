"""An error is said once, in one line, however many processes meet it or lose one another through it."""

import os
import socket
import subprocess
from pathlib import Path

import pytest
import warm

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TINY = "--dataset SAMPLE --size 8 --precision 32.32 --batch-size 16 --replication-factor 2 --limit-train-batches 2".split()


def run(folder: Path, *words: str, launcher: list[str] = TORCHRUN, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    return warm.run([*launcher, "-m", "resnet_ipu", *words], cwd=folder, env=environment, timeout=120, spares=2)


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


@pytest.mark.parametrize("launcher", [TORCHRUN, []], ids=["torchrun", "Lightning's launcher"])
def test_an_error_of_the_first_process_alone_is_not_buried_by_the_others(launcher, tmp_path):
    (tmp_path / "file").write_text("no directory")
    more = [] if launcher else ["--processes", "2"]
    done = run(tmp_path, *TINY, *more, "--output-dir", "file", launcher=launcher)
    assert done.returncode != 0
    assert errors(done) == ["resnet_ipu: error: cannot write in the output directory file: File exists"]


def test_an_address_that_is_in_use_is_one_line_and_leaves_no_process(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        # The children hold the pipes: that this returns says that they have ended.
        done = run(tmp_path, *TINY, "--processes", "2", launcher=[], MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT): another program uses this port" in done.stderr
