"""What a run shows and leaves behind: table, progress line, closing lines, metrics.csv, the output directory."""

import csv
import io
import re
import resource
import threading
import time
from contextlib import contextmanager

import pytest
import pytorch_lightning as pl
import torch
import warm
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

from lightning_ipu.command import display
from lightning_ipu.command.display import RunDisplay, closing_lines
from lightning_ipu.command.output import MetricsFile, OutputDirectory, write_scores
from lightning_ipu.files import OutputDirectoryError, atomic_write
from lightning_ipu.strategy import IPUStrategy


class Slow(pl.LightningModule):
    """One weight, and a step that takes a while."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        super().__init__()
        self.weight, self.seconds = torch.nn.Parameter(torch.zeros(())), seconds

    def training_step(self, batch, batch_idx):
        time.sleep(self.seconds)
        loss = (self.weight * batch[0].mean() - 1) ** 2
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", batch[0].mean())
        self.log("val_accuracy", 0.25)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _run(
    directory, *, samples: int, console: Console, seconds: float = 0.0, epochs: int = 1, log_interval: float | None = None, **plan: int
) -> RunDisplay:
    facts = [("network", "one weight"), ("device", "CPU")]
    shown = RunDisplay(title="test", facts=facts, console=console, log_interval=log_interval)
    trainer = pl.Trainer(
        strategy=IPUStrategy(**plan),
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[shown],
        logger=MetricsFile(directory),
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=directory,
    )
    data = DataLoader(TensorDataset(torch.ones(samples)), batch_size=2)
    trainer.fit(Slow(seconds=seconds), data, DataLoader(TensorDataset(torch.ones(3)), batch_size=2))
    return shown


def test_plain_output_shows_the_plan_and_an_epoch_in_lines_without_control_codes(tmp_path):
    text = io.StringIO()
    shown = _run(
        tmp_path, samples=21, console=Console(file=text, width=100), epochs=2, replication_factor=2, gradient_accumulation_factor=2
    )
    output = text.getvalue()
    assert "\x1b" not in output and "\r" not in output
    for name, value in (
        ("network", "one weight"),
        ("parameters", "1"),
        ("micro-batch", "2"),
        ("gradient accumulation A", "2"),
        ("replicas R", "2"),
        ("stages S", r"1 \(2 virtual IPUs\)"),
        ("global batch", "8 samples per weight update"),
        ("epoch", "2 weight updates, 5 samples left out"),
    ):
        assert re.search(rf"{name} +{value}", output), name
    assert re.search(r"^epoch 1/2 · train loss \d\.\d+ · val loss 1\.0000 · val accuracy 25\.00 % · \d+\.\d s$", output, re.M)
    assert output.count("train loss") == 2
    assert shown.throughput > 0 and shown.validated_at == 4
    assert shown._words().startswith("epoch 2/2 · update 2/2")  # also now that the epoch is over


def test_plain_lines_come_now_and_then_within_one_host_step(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "SECONDS_BETWEEN_LINES", 0.05)
    text = io.StringIO()
    _run(tmp_path, samples=40, console=Console(file=text, width=120), seconds=0.02, device_iterations=20)
    seen = [int(number) for number in re.findall(r"^epoch 1/1 · update (\d+)/20 · loss", text.getvalue(), re.M)]
    assert len(seen) >= 3 and seen == sorted(seen) and 0 < seen[0] < seen[-1] <= 20
    assert re.search(r"lr 0\.1 · \d+\.\d samples/s · \d+\.\d s left", text.getvalue())
    assert not [thread for thread in threading.enumerate() if thread.name == "progress lines"]


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_come_as_often_as_they_were_asked_for_on_a_terminal_too(tmp_path, terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    _run(tmp_path, samples=40, console=console, seconds=0.02, log_interval=0.1, device_iterations=20)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue()).replace("\r", "\n")
    lines = re.findall(r"^epoch 1/1 · update \d+/20 · loss", shown, re.M)
    assert 2 <= len(lines) <= 8  # of a host step that takes at least 0.4 s


def test_on_a_terminal_the_bar_moves_within_one_host_step(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "REFRESHES_PER_SECOND", 20.0)
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    _run(tmp_path, samples=40, console=console, seconds=0.02, device_iterations=20)
    seen = {int(number) for number in re.findall(r"update (\d+)/20", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue()))}
    assert len(seen) >= 3


def test_closing_lines_have_the_original_programs_format():
    assert closing_lines(throughput=123.44, accuracy=0.486, loss=1.423) == [
        "throughput: 123.4 samples/sec",
        "accuracy: 48.60 %",
        "loss: 1.4230",
    ]
    assert closing_lines(loss=2.0) == ["loss: 2.0000"]


# -- metrics.csv --------------------------------------------------------------------------------------------------------------


def _rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_values_of_one_step_share_a_row_and_columns_grow(tmp_path):
    logger = MetricsFile(tmp_path)
    logger.log_metrics({"train_loss": 2.0, "epoch": 0}, step=0)
    logger.log_metrics({"train_loss": 1.5, "epoch": 0}, step=3)
    logger.log_metrics({"val_loss": 1.25, "epoch": 0}, step=3)
    logger.log_metrics({"train_loss": 1.0, "epoch": 1}, step=4)
    logger.finalize("success")
    assert _rows(logger.path) == [
        {"step": "0", "epoch": "0", "train_loss": "2", "val_loss": ""},
        {"step": "3", "epoch": "0", "train_loss": "1.5", "val_loss": "1.25"},
        {"step": "4", "epoch": "1", "train_loss": "1", "val_loss": ""},
    ]


def test_a_late_value_joins_the_row_of_its_step(tmp_path):
    logger = MetricsFile(tmp_path)
    for step in (0, 1, 2):
        logger.log_metrics({"train_loss": float(step)}, step=step)
    logger.log_metrics({"late": 7.0}, step=1)
    logger.finalize("success")
    assert [(row["step"], row["train_loss"], row["late"]) for row in _rows(logger.path)] == [
        ("0", "0", ""),
        ("1", "1", "7"),
        ("2", "2", ""),
    ]


def test_a_continued_file_keeps_its_rows_up_to_the_update_it_goes_on_after(tmp_path):
    first = MetricsFile(tmp_path)
    for step in range(4):
        first.log_metrics({"train_loss": float(step), "only_before": 1.0}, step=step)
    first.flush()
    assert len(_rows(first.path)) == 4  # though a run that ends here is killed
    again = MetricsFile(tmp_path)
    again.go_on_after(2)
    again.log_metrics({"train_loss": 14.0}, step=4)
    again.finalize("success")
    rows = _rows(again.path)
    assert [(row["step"], row["train_loss"]) for row in rows] == [("0", "0"), ("1", "1"), ("4", "14")]
    assert rows[0]["only_before"] == "1" and rows[2]["only_before"] == ""


@pytest.mark.parametrize(("before", "goes_on", "trained"), [(range(5), 5, range(5, 9)), ((), 0, range(9))], ids=["resumed", "begun"])
def test_what_is_logged_after_training_that_went_on_joins_the_rows_of_the_whole_run(tmp_path, before, goes_on, trained):
    first = MetricsFile(tmp_path)
    for step in before:
        first.log_metrics({"train_loss": float(step)}, step=step)
    first.finalize("success")
    logger = MetricsFile(tmp_path)
    logger.go_on_after(goes_on)
    for step in trained:
        logger.log_metrics({"train_loss": float(step)}, step=step)
    logger.finalize("success")  # the training is over; a test of the final weights follows
    logger.log_metrics({"test_loss": 2.5}, step=9)
    logger.finalize("success")
    assert [int(row["step"]) for row in _rows(logger.path)] == list(range(10))


def test_half_a_line_of_a_killed_run_is_no_row(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,epoch,train_loss\r\n0,0,1.5\r\n1,0")
    logger = MetricsFile(tmp_path)
    logger.log_metrics({"train_loss": 1.0}, step=2)
    logger.finalize("success")
    assert [(row["step"], row["train_loss"]) for row in _rows(logger.path)] == [("0", "1.5"), ("2", "1")]


@contextmanager
def full_disk(bytes_left: int):
    """No file can grow beyond so many bytes, which a file system reports like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_by_the_name_of_the_file_and_the_rows_before_it_stay(tmp_path):
    logger = MetricsFile(tmp_path)
    with full_disk(200):
        with pytest.raises(OSError, match="while writing") as raised:
            for step in range(100):
                logger.log_metrics({"train_loss": 1.5}, step=step)
        logger.finalize("failed")  # as Lightning does then: it has been told
    assert raised.value.filename == str(logger.path)
    assert [row["step"] for row in _rows(logger.path)[:10]] == [str(step) for step in range(10)]


def write_text(path, text):
    with atomic_write(path, "w") as file:
        file.write(text)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("validation.csv", lambda folder: write_scores(folder, [{"step": 3}])),
        ("config.yaml", lambda folder: write_text(folder / "config.yaml", "seed: 1")),
        (".lock", lambda folder: OutputDirectory(folder).begin()),
    ],
)
def test_every_small_file_is_named_when_the_disk_is_full(name, write, tmp_path):
    (tmp_path / name).write_text("")
    with full_disk(0), pytest.raises(OSError, match="while writing") as raised:
        write(tmp_path)
    assert raised.value.filename == str(tmp_path / name)


# -- the output directory -----------------------------------------------------------------------------------------------------


def test_an_earlier_run_is_moved_aside_and_other_files_stay(tmp_path):
    output = OutputDirectory(tmp_path / "results")
    assert output.set_aside_earlier_run() is None
    for number in (1, 2):
        (output.path / "config.yaml").write_text(str(number))
        (output.path / "checkpoints").mkdir()
        (output.path / "notes.txt").write_text("mine")
        assert output.set_aside_earlier_run() == output.path / f"earlier-{number}"
        assert (output.path / f"earlier-{number}" / "config.yaml").read_text() == str(number)
        assert (output.path / f"earlier-{number}" / "checkpoints").is_dir()
    assert {path.name for path in output.path.iterdir()} == {"earlier-1", "earlier-2", "notes.txt", ".lock"}
    output.release()


def test_a_directory_in_use_by_a_live_process_is_refused_and_free_after_its_end(tmp_path):
    script = "import sys, time; from lightning_ipu.command.output import OutputDirectory; o = OutputDirectory(sys.argv[1]); o.begin(); print('held', flush=True); time.sleep(100)"
    holder = warm.start(["-c", script, str(tmp_path)], stdout=warm.PIPE)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(OutputDirectoryError, match=f"{tmp_path} is in use by process {holder.pid}"):
            OutputDirectory(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    OutputDirectory(tmp_path).release()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputDirectoryError, match=f"output directory {tmp_path}/file"):
        OutputDirectory(tmp_path / "file")
