"""A death that no broken connection tells of still ends the run, by name and within 30 s."""

import pytest
import test_dying_processes
from test_dying_processes import start


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("early", "process 1 of 2 ended with status 0, and with it the run"),
        ("stuck", "process 0 of 2, which started this one, is gone"),
        ("killed", "process 0 of 2, which started this one, is gone"),
        ("exit", "process 1 of 2 ended with status 1, and with it the run"),
    ],
    ids=["before they met", "while another computes", "while another waits", "os._exit"],
)
def test_the_run_ends_and_names_the_process(how, words, monkeypatch):
    monkeypatch.setattr(test_dying_processes, "SCRIPT", test_dying_processes.SCRIPT.replace("dying.py", "lost.py"))
    status, output, seconds = start(how)  # returns when every process has let go of its output
    assert status != 0 and "steps" not in output
    assert words in output
    assert seconds < 30 + 10  # the start of two processes included
    assert how != "killed" or "Traceback" not in output


def test_a_run_whose_second_process_fails_after_the_last_weight_update_has_failed(monkeypatch):
    monkeypatch.setattr(test_dying_processes, "SCRIPT", test_dying_processes.SCRIPT.replace("dying.py", "lost.py"))
    status, output, _ = start("late")
    assert status == 1
    assert "ValueError: too late" in output and "process 1 of 2 ended with status 1, and with it the run" in output
