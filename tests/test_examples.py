"""The scripts in examples/ run as they stand, and print what their documentation promises."""

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SECONDS = 120  # far above what any of them takes: 20 on an idle core


@pytest.fixture
def run(own_process, tmp_path, monkeypatch, capfd):
    """Runs a script in an empty directory, in this process, and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def too_long(*arguments):
        raise TimeoutError(f"the script takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)

    def run(name: str, *arguments: str) -> str:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        signal.alarm(SECONDS)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        signal.alarm(0)
        return capfd.readouterr().out

    yield run
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert not list(tmp_path.iterdir()), "a script leaves nothing in the current directory"


def test_own_module(run):
    output = run("own_module.py")
    assert "192 weight updates of 64 samples" in output  # 6 epochs x 2048 samples / 64
    assert float(re.search(r"accuracy on 500 other points: ([\d.]+)", output)[1]) > 0.9


def test_finetune_images(run):
    output = run("finetune_images.py")
    assert "classes: 2: 0 blue, 1 red" in output
    assert float(re.search(r"accuracy on 32 validation images: ([\d.]+)", output)[1]) > 0.8


def test_cosmoflow_small(run):
    output = run("cosmoflow_small.py")
    assert float(re.search(r"mean absolute error on 8 universes: ([\d.]+)", output)[1]) < 0.5
    assert re.findall(r"^  (\w+): 0\.\d", output, re.MULTILINE) == ["omega_m", "sigma_8", "n_s", "h_0"]


def test_resumed(run):
    output = run("resumed.py")
    assert "stopped after weight update 11, resumed until 16" in output  # 2 epochs x 128 samples / (2 x 2 x 4)
    assert "stopped: weights are not those" in output and "resumed: weights are those of the run that was not stopped" in output


def test_pipeline(run, tmp_path_factory):
    in_two = subprocess.run(
        [sys.executable, str(EXAMPLES / "pipeline.py")],
        cwd=tmp_path_factory.mktemp("pipeline"),
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert in_two.returncode == 0, in_two.stderr
    sums = [re.search(r"loss ([\d.]+), sum of \|weights\| ([\d.]+)", output) for output in (in_two.stdout, run("pipeline.py", "1"))]
    assert float(sums[0][1]) < 0.8  # of log 4 = 1.39 by chance
    assert [float(number) for number in sums[0].groups()] == pytest.approx([float(number) for number in sums[1].groups()], rel=1e-4)
    assert "2 processes:" in in_two.stdout and in_two.stdout.count("sum of") == 1


def test_every_script_is_listed_short_and_tested():
    scripts = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(scripts) and len(scripts) == 5
    assert all(text.count("\n") <= 60 and f"def test_{name[:-3]}(" in Path(__file__).read_text() for name, text in scripts.items())
