"""However a run ends while loader workers live, its processes are gone a few seconds later, with the right status."""

import os
import time
from pathlib import Path

import pytest
import torch
import warm
from runs import Net, classes, fit, loader

SCRIPT = str(Path(__file__).with_name("ending.py"))
CASES = {  # to the exit status
    "error in training_step:4:no:busy training": 1,
    "error in validation_step:1:no": 1,
    "error in hook:4:persistent": 1,
    "none:1:no:damaged validation": 1,
    "none:1:persistent:damaged training": 1,
    "exit in validation_step:1:persistent": 3,
    "interrupt in validation_step:4:no": 1,
    "group in validation_step:1:persistent": 143,
    "group in training_step:1:no:busy training": 143,
    "none:1:persistent": 0,
}
IN_TWO_PROCESSES = {"none:1:no:damaged validation": 1, "group in validation_step:1:persistent": 143}
SECONDS = 8  # 5 where the machine is not busy


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), **more}


@pytest.fixture(scope="module")
def endings(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """The exit status of each case, and the seconds from the end's cause to its end."""
    cause = str(tmp_path_factory.mktemp("endings") / "cause")
    done = warm.run([SCRIPT, *CASES], env=environment(CAUSE=cause), timeout=250)
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 2]
    assert len(lines) == len(CASES), done.stdout + done.stderr
    return {case: (status, seconds) for case, status, seconds in lines}


@pytest.mark.parametrize("case", CASES)
def test_a_run_over_loader_workers_ends(case, endings):
    status, seconds = endings[case]
    assert status == str(CASES[case])
    assert seconds == "never" if CASES[case] == 0 else float(seconds) < SECONDS


@pytest.mark.parametrize("case", IN_TWO_PROCESSES)
def test_two_processes_over_loader_workers_end(case, tmp_path):
    streams = {"stdout": warm.PIPE, "stderr": warm.STDOUT, "start_new_session": True}
    done = warm.start([SCRIPT, case], env=environment(CAUSE=str(tmp_path / "cause"), DEVICES="2"), spares=1, **streams)
    output, _ = done.communicate(timeout=90)  # the workers hold the pipe: they have ended as well
    assert done.returncode == IN_TWO_PROCESSES[case], output
    assert time.time() - float((tmp_path / "cause").read_text()) < SECONDS
    assert output.count("Traceback (most recent call last)") == (2 if "damaged" in case else 0), output  # a worker's, within its error's


def test_an_error_of_the_first_process_under_torchrun_is_told_once():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*launcher, SCRIPT, "error in training_step:1:no"]
    done = warm.run(words, env=environment(DEVICES="2", RANK_THAT_ENDS="0"), timeout=100, spares=2)
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 2, done.stderr  # the error's, and torchrun's own
    assert done.stderr.count("ValueError: the end") == 1


def test_a_program_that_goes_on_after_a_failed_fit_keeps_no_workers():
    class Failing(Net):
        def validation_step(self, batch, batch_idx):
            raise ValueError("the end")

    with pytest.raises(ValueError, match="the end") as raised:
        fit(Failing(), loader(classes(16), 4, num_workers=1), loader(classes(8), 4, num_workers=1))
    assert raised.value.__traceback__ is not None  # which holds the loaders' iterators
    assert torch.multiprocessing.active_children() == []
