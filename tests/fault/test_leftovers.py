"""What another run has left in the environment is not taken for this run's processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import Ledger, fit, loader

from lightning_ipu import machine
from resnet_ipu import __main__ as resnet

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


LEFT = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2", "GROUP_RANK": "3", "RANK": "3", "WORLD_SIZE": "8"},
    "srun": {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7"},
    "jsrun": {"LSB_JOBID": "7", "LSB_DJOB_RANKFILE": "nowhere", "JSM_NAMESPACE_LOCAL_RANK": "3", "JSM_NAMESPACE_SIZE": "4"},
    "others": {"NODE_RANK": "3", "MASTER_ADDR": "nowhere.invalid", "OMPI_COMM_WORLD_SIZE": "4", "PMI_RANK": "3"},
}
ALL = {name: value for some in LEFT.values() for name, value in some.items()}


@pytest.mark.parametrize(
    "left",
    [*({name: value} for name, value in ALL.items()), {"SLURM_STEP_ID": "0"}, {"LOCAL_RANK": "3"}, *LEFT.values(), ALL],
    ids=lambda left: " ".join(left)[:40],
)
def test_whatever_a_launcher_left_is_ignored_by_a_run_of_one_process(left, monkeypatch):
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    assert machine.started_rank() == 0 and machine.launcher() is None
    module = Ledger()
    trainer = fit(module, loader(6), A=3)
    assert (trainer.global_step, trainer.world_size, trainer.global_rank) == (2, 1, 0) and module.w.item() == -2


def test_a_command_ignores_them_also_where_the_strategy_is_given_by_its_name(command_line, monkeypatch):
    for name, value in (LEFT["srun"] | {"LOCAL_RANK": "3"}).items():
        monkeypatch.setenv(name, value)
    words = "fit --trainer.strategy ipu --data.dataset SAMPLE --model.size 8 --trainer.max_steps 1 --trainer.limit_val_batches 0".split()
    status, output, errors = command_line(resnet.main, *words)
    assert status == 0 and "ResNet-8" in output, errors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (LEFT["srun"] | {"SLURM_STEP_ID": "0"}, "SLURM_NTASKS=4: .* srun --ntasks-per-node=4"),
        (LEFT["srun"] | {"SLURM_STEP_ID": "0", "SLURM_NTASKS_PER_NODE": "4"}, r"srun started 4 processes \(SLURM_NTASKS\), but devices"),
        (LEFT["jsrun"] | {"JSM_NAMESPACE_RANK": "1"}, "JSM_NAMESPACE_SIZE=4: processes are started by torchrun, srun or --processes"),
    ],
)
def test_processes_that_were_started_in_a_way_that_cannot_be_honoured_are_refused_by_name(given, message, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        fit(Ledger(), loader(6), A=3)


def test_two_processes_find_each_other_beside_all_that_launchers_left_and_an_earlier_run_is_set_aside(tmp_path):
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / "last.ckpt").write_text("an earlier run's")
    done = run(tmp_path, "--processes", "2", **ALL)
    assert done.returncode == 0, done.stderr
    assert {"config.yaml", "metrics.csv", ".lock"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / "earlier-1" / "checkpoints" / "last.ckpt").read_text() == "an earlier run's"
    assert "virtual IPUs" in done.stdout  # the table
