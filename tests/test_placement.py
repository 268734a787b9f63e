"""The placement: every virtual IPU lives in exactly one process, and numbers of processes that cannot serve a plan are refused."""

import itertools
import os
import sys
from pathlib import Path

import pytest
import warm

from lightning_ipu.loop.launcher import check_can_start_again
from lightning_ipu.placement import Placement, legal_process_counts
from lightning_ipu.plan import Plan, PlanError


@pytest.mark.parametrize(
    ("replicas", "stages", "legal"),
    [(1, 1, [1]), (4, 1, [1, 2, 4]), (1, 4, [1, 2, 4]), (2, 6, [1, 2, 4, 6, 12]), (6, 2, [1, 2, 3, 6, 12]), (3, 3, [1, 3, 9])],
)
def test_legal_process_counts_divide_the_replicas_or_spread_each_of_them(replicas, stages, legal):
    plan = Plan(replication_factor=replicas, num_stages=stages)

    assert legal_process_counts(plan) == legal
    for processes in range(0, replicas * stages + 3):
        if processes not in legal:
            with pytest.raises(PlanError, match=f"{processes} processes cannot serve .* {', '.join(map(str, legal))}$"):
                Placement(plan=plan, processes=processes)


@pytest.mark.parametrize(("replicas", "stages"), [(1, 1), (4, 2), (2, 6), (6, 4)])
def test_every_virtual_ipu_lives_in_exactly_one_process(replicas, stages):
    plan = Plan(replication_factor=replicas, num_stages=stages)
    for processes in legal_process_counts(plan):
        placement = Placement(plan=plan, processes=processes)
        homes = [list(itertools.product(placement.replicas_of(p), placement.stages_of(p))) for p in range(processes)]
        assert sorted(sum(homes, [])) == list(itertools.product(range(replicas), range(stages)))
        assert len({len(home) for home in homes}) == 1
        # Either whole replicas, or one replica's consecutive stages: a stage sends to its neighbour.
        assert all(len(placement.replicas_of(p)) == 1 or len(placement.stages_of(p)) == stages for p in range(processes))


def test_several_processes_are_refused_for_a_program_without_a_file_which_could_not_be_started_again(monkeypatch):
    script = "from lightning_ipu import IPUStrategy; import pytorch_lightning as pl; pl.Trainer(accelerator='cpu', devices=2, strategy=IPUStrategy(replication_factor=2))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = warm.run(["-c", script], env=environment, timeout=100)
    assert done.returncode == 1 and "2 processes cannot be started from python -c" in done.stderr.splitlines()[-1]
    assert "Save the program to a file, start it with torchrun, or use devices=1" in done.stderr.splitlines()[-1]

    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["-"])
    with pytest.raises(PlanError, match="2 processes cannot be started from standard input"):
        check_can_start_again(2)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", sys.__spec__)
    check_can_start_again(2)  # a module can be run again, whatever the first argument is
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    for name, words in {"-c": "python -c", "/dev/stdin": "/dev/stdin", "/gone/script.py": "/gone/script.py"}.items():
        monkeypatch.setattr(sys, "argv", [name])
        with pytest.raises(PlanError, match=f"cannot be started from {words}: "):
            check_can_start_again(2)
    monkeypatch.setattr(sys, "argv", [__file__])
    check_can_start_again(2)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(PlanError, match="an interactive session"):
        check_can_start_again(2)
