"""What a run does and how often: weight updates as the one unit, training and validation apart, checkpoints and what they score."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from runs import Ledger, Net, classes, csv_logger, csv_rows, fit, loader
from test_cli import files, run  # noqa: F401 -- fixtures
from torch.optim.lr_scheduler import LambdaLR

from resnet_ipu.module import ResNetModule

pytestmark = pytest.mark.usefixtures("own_process")

TINY = ["--dataset", "sample", "--size", "8", "--precision", "32.32", "--limit-train-batches", "4", "--limit-val-batches", "2"]


def rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# -- one unit -----------------------------------------------------------------------------------------------------------------


def test_limits_intervals_names_logs_and_schedules_all_count_weight_updates(tmp_path):
    """18 micro-batches an epoch, 7 to a weight update: 2 whole updates, so that update 100 is the last of epoch number 49."""

    class Counted(Net):
        def on_validation_start(self):
            self.validated.append((self.trainer.current_epoch, self.trainer.global_step))

    module = Counted(schedule=lambda module, optimizer: {"scheduler": LambdaLR(optimizer, lambda k: 1 / (1 + k)), "interval": "step"})
    module.validated = []
    checkpoints = ModelCheckpoint(tmp_path / "checkpoints", filename="{step}", every_n_train_steps=10, save_top_k=-1)
    trainer = fit(
        module,
        loader(classes(18)),
        loader(classes(2)),
        A=7,
        D=16,
        max_steps=100,
        max_epochs=-1,
        callbacks=checkpoints,
        enable_checkpointing=True,
        val_check_interval=9,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        logger=csv_logger(tmp_path),
        num_sanity_val_steps=0,
    )
    assert trainer.global_step == 100 and trainer.current_epoch in (49, 50)
    assert len(module.seen) == 700
    assert sorted(int(path.stem.removeprefix("step=")) for path in (tmp_path / "checkpoints").iterdir()) == list(range(10, 101, 10))
    assert module.validated == [((update - 1) // 2, update) for update in range(9, 101, 9)]
    logged = [(int(row["step"]) + 1, int(row["epoch"])) for row in csv_rows(tmp_path) if "loss_step" in row]
    assert logged == [(update, (update - 1) // 2) for update in range(1, 101)]
    assert module.rates == [pytest.approx(0.1 / (1 + k)) for k in range(100)]


def test_a_limit_takes_the_first_micro_batches_of_every_epochs_own_order_and_the_schedule_spans_what_is_trained():
    class Spanned(Net):
        def configure_optimizers(self):
            self.total = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    limited, whole = Spanned(), Spanned()
    for module, limit in ((limited, 2), (whole, 1.0)):
        fit(module, loader(classes(10), shuffle=True), max_epochs=3, limit_train_batches=limit)
    assert limited.seen == [whole.seen[10 * epoch + number] for epoch in range(3) for number in range(2)]
    assert len({tuple(map(tuple, limited.seen[2 * epoch : 2 * epoch + 2])) for epoch in range(3)}) == 3  # others in every epoch
    assert (limited.total, whole.total) == (6, 30)


def test_a_run_of_three_updates_logs_a_training_loss_in_every_epoch_at_rising_updates(run):  # noqa: F811
    status, _, errors = run(
        *TINY[:6], "--limit-train-batches", "6", "--gradient-accumulation-factor", "2", "--epochs", "2", "--validation", "false"
    )
    assert status == 0, errors
    found = rows("results/metrics.csv")
    steps = [int(row["step"]) for row in found]
    assert steps == sorted(set(steps)) and max(steps) == 5  # of 2 x 3 weight updates, counted from 0
    for epoch in ("0", "1"):
        of_epoch = [row for row in found if row["epoch"] == epoch]
        assert any(row["train_loss_step"] for row in of_epoch) and any(row["train_loss_epoch"] for row in of_epoch)


def test_the_ledger_is_that_of_the_limit():
    module = Ledger()
    fit(module, loader(24, 1), A=3, R=2, max_epochs=2, limit_train_batches=13)
    assert module.w.item() == -4 and len(module.seen) == 24  # 2 whole updates of 6 in each epoch


def test_labels_are_smoothed_in_training_only():
    class Sure(torch.nn.Module):
        def forward(self, images):
            return torch.nn.functional.one_hot(torch.arange(10), 10) * 10.0

    module = ResNetModule(size="8", label_smoothing=0.1)
    module.network, module.log = Sure(), lambda name, value, **options: found.update({name: float(value)})
    found: dict[str, float] = {}
    batch = torch.zeros(10, 3, 32, 32), torch.arange(10)
    module.training_step(batch, 0)
    module.validation_step(batch, 0)
    module.test_step(batch, 0)
    assert found["train_loss"] == pytest.approx(0.9004, abs=5e-5)
    assert found["val_loss"] == found["test_loss"] == pytest.approx(0.000409, abs=5e-7)


# -- phases -------------------------------------------------------------------------------------------------------------------


def test_checkpoints_of_a_run_are_scored_at_its_end_and_again_from_their_directory(run):  # noqa: F811
    status, output, errors = run(*TINY, "--epochs", "5", "--ckpts-per-epoch", "1/3", "--first-ckpt-epoch", "2", "--test")
    assert status == 0, errors
    assert files("results/checkpoints") == {"last.ckpt", "update8.ckpt", "update20.ckpt"}  # after epochs 2 and 5
    scores = rows("results/validation.csv")
    assert [(row["step"], row["epochs"], row["checkpoint"]) for row in scores] == [("8", "2", "update8.ckpt"), ("20", "5", "update20.ckpt")]
    table = [re.findall(r"[\w.]+", line) for line in output.splitlines() if "│" in line and ".ckpt" in line]
    assert [words[2] for words in table] == ["update8.ckpt", "update20.ckpt"]
    assert [words[4] for words in table] == [f"{100 * float(row['val_accuracy']):.2f}" for row in scores]
    final = f"accuracy: {100 * float(scores[-1]['val_accuracy']):.2f} %\nloss: {float(scores[-1]['val_loss']):.4f}\n"
    assert final in output and "val loss" not in output  # validated at the end, not after every epoch
    assert [row["val_loss"] for row in rows("results/metrics.csv") if row["val_loss"]] == [scores[-1]["val_loss"]]
    tested = re.search(r"test accuracy: .*\ntest loss: .*\n", output)[0]

    # The same run again is the same run, all of its phases: the table and its file, the last row, the test.
    status, replay, errors = run("fit", "--config", "results/config.yaml", "--trainer.default_root_dir", "replays")
    assert status == 0, errors
    said = [
        [line for line in re.sub(r"replays|results", "DIR", text).splitlines() if re.match("accuracy|loss|test|the same|[│┃]", line)]
        for text in (output, replay)
    ]
    assert said[0] == said[1] and len(said[0]) > 10
    for name in ("metrics.csv", "validation.csv"):
        assert Path("replays", name).read_text() == Path("results", name).read_text()
    again = Path("replays/config.yaml").read_text().replace("default_root_dir: replays", "default_root_dir: results")
    assert again == Path("results/config.yaml").read_text()

    Path("copies").mkdir()
    for name, source in (("a.ckpt", "update20"), ("b.ckpt", "update8"), ("last.ckpt", "last")):
        Path("copies", name).write_bytes(Path(f"results/checkpoints/{source}.ckpt").read_bytes())
    # The network, the data and the precision are those of the checkpoints.
    status, output, errors = run(
        "--training", "false", "--checkpoint-input-dir", "copies", "--limit-val-batches", "2", "--output-dir", "out"
    )
    assert status == 0 and "RANDOM" not in errors, errors
    again = rows("out/validation.csv")
    assert [row["checkpoint"] for row in again] == ["b.ckpt", "a.ckpt"]  # in the order of their updates; last.ckpt is the same as one
    for before, after in zip(scores, again, strict=True):
        assert float(after["val_loss"]) == pytest.approx(float(before["val_loss"]), abs=1e-6)
        assert float(after["val_accuracy"]) == pytest.approx(float(before["val_accuracy"]), abs=1e-6)
    status, output, _ = run("test", "--ckpt_path", "results/checkpoints/last.ckpt")
    assert tested.removeprefix("test ").replace("\ntest ", "\n") in output  # scoring others came after the test


@pytest.mark.parametrize("plan", ["", "--num-replicas 2 --gradient-accumulation-count 2 --batches-per-step 1", "--precision 16.16"])
def test_validate_gives_what_fit_measured_last_under_every_plan(run, plan):  # noqa: F811
    assert run(*TINY, "--epochs", "1", *plan.split())[0] == 0
    measured = [row for row in rows("results/metrics.csv") if row["val_loss"]][-1]
    assert (
        run("--training", "false", "--checkpoint-input-dir", "results/checkpoints", "--limit-val-batches", "2", "--output-dir", "out")[0]
        == 0
    )
    for row in rows("out/validation.csv"):  # last.ckpt, and the best, which are of one update
        assert float(row["val_loss"]) == pytest.approx(float(measured["val_loss"]), abs=1e-6)


def test_without_checkpoints_final_or_loudly_random_weights_are_scored(run):  # noqa: F811
    status, output, errors = run(*TINY, "--epochs", "1", "--ckpts-per-epoch", "0")
    assert status == 0 and files("results/checkpoints") == {"last.ckpt"} and not Path("results/validation.csv").exists()
    assert "RANDOM" not in errors and re.search(r"accuracy: .*\nloss: ", output)
    Path("empty").mkdir()
    status, output, errors = run(*TINY[:4], "--training", "false", "--checkpoint-input-dir", "empty", "--limit-val-batches", "1")
    assert status == 0 and "warning: there is no checkpoint (*.ckpt) in empty" in errors and "the weights are RANDOM" in errors
    status, _, errors = run("--training", "false", "--checkpoint-input-dir", "nowhere")
    assert status == 2 and errors == "resnet_ipu: error: --checkpoint-input-dir nowhere: there is no such directory\n"


def test_checkpoints_are_deleted_once_they_are_scored_where_that_is_asked_for(run):  # noqa: F811
    status, _, errors = run(*TINY, "--epochs", "1", "--ckpts-per-epoch", "2", "--clean-dir")
    assert status == 0, errors
    assert len(rows("results/validation.csv")) == 2 and files("results/checkpoints") == {"last.ckpt"}


def test_training_alone_keeps_its_checkpoints_and_a_resumed_run_scores_those_of_both_starts(run):  # noqa: F811
    line = [*TINY, "--ckpts-per-epoch", "1"]
    assert run(*line, "--epochs", "1", "--validation", "false")[0] == 0
    assert files("results/checkpoints") == {"last.ckpt", "update4.ckpt"} and not Path("results/validation.csv").exists()
    status, _, errors = run("--resume", "--epochs", "2", "--validation", "true")
    assert status == 0, errors
    assert [row["step"] for row in rows("results/validation.csv")] == ["4", "8"]


def test_an_impossible_frequency_ends_before_anything_is_written(run):  # noqa: F811
    status, _, errors = run(*TINY, "--epochs", "5", "--logs-per-epoch", "1/2")
    assert status == 2 and "error: 1/2 logs per epoch cannot be in 5 epochs: 5 is no multiple of 2" in errors
    assert not Path("results/config.yaml").exists()


def test_weights_and_biases_works_offline_or_says_what_is_missing(run, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WANDB_MODE", "offline")
    status, _, errors = run(*TINY, "--epochs", "1", "--wandb", "--wandb-run-name", "one", "--wandb-tags", "a,b")
    if importlib.util.find_spec("wandb") is None:
        assert status == 2 and errors == "resnet_ipu: error: wandb needs the package of that name: pip install wandb\n"
    else:
        assert status == 0 and len(list(Path("results/wandb").glob("offline-run-*/*.wandb"))) == 1
