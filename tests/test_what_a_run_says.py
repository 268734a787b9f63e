"""What a short run of each command prints, in one process and in two: what a user must know, and nothing else."""

import os
import re
from pathlib import Path

import pytest
import warm

import cifar_ipu.__main__
import cosmoflow_ipu.__main__
import resnet_ipu.__main__

RESNET = "--dataset SAMPLE --size 8 --precision 32.32 --limit-train-batches 8 --limit-val-batches 2"
CIFAR = "--dataset SAMPLE --precision 32.32 --epochs 0.1"
COSMOFLOW = "--n-train 8 --n-valid 4 --n-epochs 1 --conv-size 2 --oversample 1 --precision 32.32"

# (command, options, rows of the table, lines beside it, the closing lines)
RUNS = [
    (
        resnet_ipu,
        f"{RESNET} --optimizer adamw --seed 3 --output-dir out",
        {
            "optimizer": "adamw",
            "learning rate": "0.003 at its peak, schedule linear",
            "seed": "3",
            "output directory": "out",
            "device iterations D": "16 weight updates per host step, at most; here 8: an epoch",
            "epoch": "8 weight updates, 1,744 samples left out",
        },
        [r"epoch 1/1 · train loss [\d.]+ · val loss [\d.]+ · val accuracy [\d.]+ % · [\d.]+ s"],
        [
            r"throughput: [\d.]+ samples/sec",
            r"accuracy: [\d.]+ %",
            r"loss: [\d.]+",
            r"results in out: last checkpoint out/checkpoints/last.ckpt, best out/checkpoints/best-update8.ckpt \(val_accuracy 0.\d{4}\)",
            r"These figures are from the embedded sample .*",
        ],
    ),
    (
        cifar_ipu,
        CIFAR,
        {"optimizer": "sgd", "learning rate": "0.01 at its peak, schedule const", "seed": "0", "output directory": "results"},
        [r"epoch 1 · train loss [\d.]+ · [\d.]+ s"],
        [
            r"throughput: [\d.]+ samples/sec",
            r"test accuracy: [\d.]+ %",
            r"test loss: [\d.]+",
            r"results in results: last checkpoint results/checkpoints/last.ckpt",
            r"These figures are from the embedded sample .*",
        ],
    ),
    (
        cosmoflow_ipu,
        COSMOFLOW,
        {"optimizer": "SGD", "learning rate": "0.02 at its peak, schedule linear", "epoch": "1 weight update, 0 samples left out"},
        [r"val MAE .*", r"epoch 1/1 · train loss [\d.]+ · val loss [\d.]+ · [\d.]+ s"],
        [
            r"throughput: [\d.]+ samples/sec",
            r"loss: [\d.]+",
            r"results in results: last checkpoint results/checkpoints/last.ckpt, best results/checkpoints/best-update1.ckpt \(val_mae 0.\d{4}\)",
            r"MAE 0\.[\d.]+: Ω_m .*",
            r"That is no better than a constant: the middle of each range gets 0\.\d{4}\. Train for longer, or on more universes\.",
        ],
    ),
]


def rows(output: str) -> dict[str, str]:
    """The table at the start, by the names of its rows."""
    return dict(re.findall(r"^│ (\S.*?)  +(\S.*?) +│$", output, re.M))


@pytest.mark.parametrize(("package", "line", "table", "meanwhile", "closing"), RUNS, ids=["resnet", "cifar", "cosmoflow"])
def test_a_short_run_says_what_it_does_and_where_it_left_it_and_nothing_else(command_line, package, line, table, meanwhile, closing):
    status, output, errors = command_line(package.__main__.main, *line.split())
    assert status == 0 and errors == ""
    assert table.items() <= rows(output).items()
    for text, wanted in zip(output.split("╯\n")[1].splitlines(), [*meanwhile, *closing], strict=True):
        assert re.fullmatch(wanted, text), (text, wanted)


def test_a_run_on_two_processes_says_the_same_shows_the_loss_and_whose_profile_it_is(tmp_path):
    line = f"{CIFAR} --epochs 0.3 --pipeline --processes 2 --profile --log-interval 0.1 --batches-per-step 1 --validation-split 0.1"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = warm.run(["-m", "cifar_ipu", *line.split()], cwd=tmp_path, env=environment, timeout=120, spares=1)
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(r"^epoch 1 · update \d+/\d · loss [\d.]+ · lr [\d.]+ · ", done.stdout, re.M), done.stdout
    assert "epoch 2" not in done.stdout  # also while what follows the only one is done
    assert rows(done.stdout)["processes"] == "2" and "one process runs" not in rows(done.stdout)["stages S"]
    whose = "of the first of 2 processes alone"
    assert f"results/train_report.txt: where the time went, {whose}, by torch.profiler" in done.stdout
    assert whose in (tmp_path / "results/train_report.txt").read_text().splitlines()[0]
