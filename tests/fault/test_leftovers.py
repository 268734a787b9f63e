"""What another run has left in the environment is not taken for this run's processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """--dataset SAMPLE --size 8 --precision 32.32 --batch-size 16 --limit-train-batches 2 --limit-val-batches 1 --no-validation
    --replication-factor 2 --output-dir out""".split()


def run(folder: Path, *more: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    return subprocess.run(
        [sys.executable, "-m", "resnet_ipu", *RUN, *more],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "left",
    [{"RANK": "1"}, {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3"}, {"SLURM_PROCID": "3", "SLURM_JOB_ID": "7"}],
    ids=lambda left: " ".join(left),
)
def test_a_run_of_one_process_writes_all_its_files_and_sets_an_earlier_run_aside(left, tmp_path):
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / "last.ckpt").write_text("an earlier run's")
    done = run(tmp_path, **left)
    assert done.returncode == 0, done.stderr
    assert {"config.yaml", "metrics.csv", ".lock"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / "earlier-1" / "checkpoints" / "last.ckpt").read_text() == "an earlier run's"
    assert "virtual IPUs" in done.stdout  # the table
