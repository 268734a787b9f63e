"""A run is not lost because nobody reads what it prints."""

import os
from pathlib import Path

import warm

RUN = """--dataset SAMPLE --size 8 --precision 32.32 --batch-size 16 --limit-train-batches 20 --limit-val-batches 2 --no-validation
    --output-dir out""".split()


def start(folder: Path, *words: str, **streams) -> warm.Process:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return warm.start(["-m", "resnet_ipu", *words], cwd=folder, env=environment, **streams)


def updates_kept(folder: Path) -> list[str]:
    """The weight updates of the rows in metrics.csv, where there is a checkpoint as well."""
    assert (folder / "out" / "checkpoints" / "last.ckpt").exists()
    return [line.split(",")[0] for line in (folder / "out" / "metrics.csv").read_text().splitlines()[1:]]


def test_a_run_goes_on_when_the_reader_of_its_output_has_gone_and_says_so_once(tmp_path):
    process = start(tmp_path, *RUN, stdout=warm.PIPE, stderr=warm.PIPE)
    assert "resnet_ipu" in process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    errors = process.stderr.read()
    assert process.wait(timeout=100) == 0
    assert errors.splitlines() == ["resnet_ipu: nobody reads standard output any more: the run goes on, and what it prints is lost"]
    assert updates_kept(tmp_path)[-1] == "19"


def test_a_run_goes_on_when_its_output_cannot_be_written_and_has_another_status(tmp_path):
    with open("/dev/full", "w") as full:
        process = start(tmp_path, *RUN, stdout=full, stderr=warm.PIPE)
        errors = process.communicate(timeout=100)[1]
    assert process.returncode == 1 and len(errors.splitlines()) == 1 and "No space left on device" in errors
    assert updates_kept(tmp_path)[-1] == "19"


def test_a_help_whose_reader_has_gone_is_no_error(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    process = start(tmp_path, "--help", stdout=writing, stderr=warm.PIPE)
    os.close(writing)
    assert process.communicate(timeout=100)[1] == "" and process.returncode == 0
