"""A run that is killed again and again, inside saves and between them, ends as the run that nobody touched.

KILLS=20 in the environment gives the long form; a failure prints the seed with which it can be had again (KILL_SEED).
"""

import hashlib
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import warm

SCRIPT = str(Path(__file__).with_name("killed.py"))
KILLS, SEED = int(os.environ.get("KILLS", "3")), int(os.environ.get("KILL_SEED", "1"))
# Everything that draws or counts: crops and flips, order, stochastic rounding, BatchNorm, replicas, an odd number of updates between saves.
EPOCHS = 2 if KILLS <= 3 else 3 + KILLS // 3  # every kill comes after a save
RUN = f"""--dataset SAMPLE --size 8 --precision 16.16 --batch-size 4 --replication-factor 2 --gradient-accumulation-factor 2 --epochs {EPOCHS}
    --limit-train-batches 40 --valid-per-epoch 2 --limit-val-batches 2 --batches-per-step 4 --num-workers 1 --steps-per-log 3 --optimizer adamw
    --checkpoint-every 3 --keep-last 2 --resume""".split()
STATUS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}


def start(folder: Path, *more: str, launcher: Sequence[str] = (), without: str | None = None) -> warm.Process:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    options = [word for word in RUN if word != without]
    words = [*launcher, SCRIPT, "0.05", *options, "--output-dir", "out", *more]
    return warm.start(words, cwd=folder, env=environment, stdout=warm.PIPE, stderr=warm.STDOUT, spares=4)


def result(folder: Path) -> dict[str, str]:
    """What a run has come to: hashes of weights, optimizer state, schedule and of every file that a person reads."""
    checkpoints = folder / "out" / "checkpoints"
    last = torch.load(checkpoints / "last.ckpt", weights_only=True)
    found = {
        name: hashlib.sha256(repr(_plain(last[name])).encode()).hexdigest() for name in ("state_dict", "optimizer_states", "lr_schedulers")
    }
    found |= {"position": repr(last["lightning_ipu"]["position"]), "files": " ".join(sorted(path.name for path in checkpoints.iterdir()))}
    return found | {name: (folder / "out" / name).read_text() for name in ("metrics.csv", "config.yaml")}


def numbers(found: dict[str, str]) -> dict[str, str]:
    """The part of a result that is the same for every number of processes."""
    return {name: value for name, value in found.items() if name not in ("config.yaml", "files")}


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.double().tolist()
    if isinstance(value, dict):
        return [(name, _plain(value[name])) for name in value]
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def wait_for(moment: str, checkpoints: Path, process: warm.Process, chance: random.Random) -> None:
    """Wait until the process is inside a save, or a while after one; or has ended."""
    seen = {path: path.stat().st_mtime_ns for path in checkpoints.glob("*.ckpt")} if checkpoints.exists() else {}
    left = set(checkpoints.glob(".*.part"))  # by the kill before
    begun = time.monotonic()
    while process.poll() is None and time.monotonic() - begun < 60:
        if moment == "in a save" and set(checkpoints.glob(".*.part")) - left:
            time.sleep(chance.uniform(0, 0.05))
            return
        if moment == "after a save" and any(path.stat().st_mtime_ns != seen.get(path) for path in checkpoints.glob("last.ckpt")):
            time.sleep(chance.uniform(0, 0.3))
            return
        time.sleep(0.002)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untouched")
    process = start(folder)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return folder, result(folder)


def test_kills_at_random_points_change_nothing(untouched, tmp_path):
    chance, kills, statuses = random.Random(SEED), 0, []
    for _ in range(2 * KILLS + 2):
        process = start(tmp_path)
        if kills < KILLS:
            number = list(STATUS)[kills % 3]
            wait_for(
                ("in a save", "after a save")[kills // 3 % 2 if KILLS > 3 else kills % 2], tmp_path / "out" / "checkpoints", process, chance
            )
            process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        statuses.append(process.returncode)
        if process.returncode == 0:
            break
        assert process.returncode == STATUS[number], output
        kills += 1
    assert statuses[-1] == 0 and kills == KILLS, f"seed {SEED}: {statuses}"
    assert result(tmp_path) == untouched[1], f"seed {SEED}: {statuses}"


def test_a_finished_run_is_already_complete_and_no_file_is_touched(untouched):
    folder, before = untouched
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    process = start(folder)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and f"already complete: {10 * EPOCHS} weight updates, {EPOCHS} epochs" in output
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times and result(folder) == before


def test_torchrun_restarts_a_killed_worker_and_the_run_goes_on_by_itself(untouched, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    process = start(tmp_path, launcher=launcher, without="--resume")
    wait_for("after a save", tmp_path / "out" / "checkpoints", process, random.Random(SEED))
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[1]), signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "goes on after weight update" in output
    assert numbers(result(tmp_path)) == numbers(untouched[1])


def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_update_and_one_process_goes_on(untouched, tmp_path):
    process = start(tmp_path, "--processes", "2")
    wait_for("after a save", tmp_path / "out" / "checkpoints", process, random.Random(SEED))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 143 and output.count("the state is saved in") == 1, output
    process = start(tmp_path, "--processes", "1")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and "resuming with --processes 1 in place of 2" in output, output
    assert numbers(result(tmp_path)) == numbers(untouched[1])
