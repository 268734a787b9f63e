"""Every command line of the README's tables and listings runs: with options added that shrink it, in the README's order and one directory."""

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from image_tree import make_tree

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMAND = re.compile(r"`((?:torchrun |python -m \w+_ipu|python benchmarks/)[^`]*)`")

_RESNET = "--dataset SAMPLE --micro-batch-size 8 --limit-val-batches 1 --validation-micro-batch-size 8 --precision 32.32 --weight-updates-per-epoch"
_ONE, _TWO = f"{_RESNET} 1 --epochs 1", f"{_RESNET} 2"
_IMAGES = "--size 8 --image-size 16 --micro-batch-size 8 --max-steps 1 --num-workers 0 --precision 32.32"
_CNN = "--dataset SAMPLE --precision 32.32 --epochs"
_UNIVERSES = "--n-train 4 --n-valid 1 --n-epochs 1 --oversample 1 --precision 32.32 --conv-size 2 --micro-batch-size 2"

# What is added to each line so that it takes about a second: later options win. DIR and SHARDS are replaced.
SHRUNK = {
    "python -m resnet_ipu --size 50 --dataset IMAGENET --data-dir DIR": _IMAGES,
    "python -m resnet_ipu convert DIR SHARDS": "--num-workers 1",
    "python -m resnet_ipu --size 50 --dataset IMAGENET --data-dir DIR --data-benchmark": _IMAGES,
    "python -m resnet_ipu --size 20 --dataset CIFAR-10 --data-dir DIR --batch-size 128 --epochs 30": f"{_CNN} 1 --weight-updates-per-epoch 1",
    "python -m resnet_ipu --size 8 --dataset FASHION-MNIST --data-dir DIR --batch-size 128 --epochs 3 --validate-on-test --lr-schedule cosine"
    " --lr-end-ratio 0 --no-zero-init --shortcut-type B": f"{_CNN} 1 --weight-updates-per-epoch 1",
    "python -m resnet_ipu --size 50 --batch-size 64 --replication-factor 4 --gradient-accumulation-factor 8": (
        "--dataset SAMPLE --size 8 --batch-size 16 --precision 32.32 --weight-updates-per-epoch 1 --limit-val-batches 1"
    ),
    "python -m resnet_ipu --size 50 --num-ipus 2 --pipeline --recompute --gradient-accumulation-factor 8": f"{_CNN} 1 --size 8 --batch-size 4"
    " --weight-updates-per-epoch 1 --limit-val-batches 1",
    "python -m resnet_ipu --size 50 --num-ipus 2 --pipeline --recompute --gradient-accumulation-factor 8 --processes 2": f"{_CNN} 1 --size 8"
    " --batch-size 4 --weight-updates-per-epoch 1 --limit-val-batches 2 --validation-micro-batch-size 8",
    "torchrun --nproc-per-node 2 -m resnet_ipu --size 20 --replication-factor 2": f"{_CNN} 1 --size 8 --batch-size 4"
    " --weight-updates-per-epoch 1 --limit-val-batches 2 --validation-micro-batch-size 8",
    "python -m resnet_ipu --size 20 --precision 16.16": _ONE.replace("--precision 32.32 ", ""),
    "python -m cifar_ipu": f"{_CNN} 0.03",
    "python -m cifar_ipu --recipe fast --mirror-evaluation --dataset FASHION-MNIST --data-dir DIR": f"{_CNN} 0.07 --network whitened",
    "python -m cifar_ipu --profile": f"{_CNN} 0.025 --batch-size 2",
    "python -m cosmoflow_ipu": _UNIVERSES,
    "python -m resnet_ipu --size 20 --synthetic-data ipu": _ONE.replace("--dataset SAMPLE ", ""),
    "python -m resnet_ipu --size 20 --mixup 0.2 --cutmix 1 --auto-augment trivialaugment --ema 0.999": _ONE,
    "python -m resnet_ipu --size 8 --epochs 3 --keep-last 3": f"{_RESNET} 1",
    "python -m resnet_ipu average --checkpoint-input-path results --weight-avg-N 3": "",
    "python -m resnet_ipu validate --model.size 50 --model.pretrained resnet50.pth --data.dataset …": (
        "IMAGENET --model.stem imagenet --data.data_dir DIR --data.image_size 32 --data.eval_batch_size 4 --precision 32.32"
    ),
    "python -m resnet_ipu --config resnet50_16ipus_8k_bn_pipeline --synthetic-data host": (
        "--micro-batch-size 2 --replication-factor 1 --gradient-accumulation-factor 1 --max-steps 1 --limit-val-batches 1 --validation-micro-batch-size 2"
    ),
    "python -m resnet_ipu --size 8 --ckpts-per-epoch 2": _TWO,
    "python -m resnet_ipu --training false --checkpoint-input-dir results/checkpoints": "--limit-val-batches 1 --output-dir scored",
    "python -m resnet_ipu --help": "",
    "python -m resnet_ipu --size 20 --resume": f"{_ONE} --output-dir resumed",
    "python -m resnet_ipu fit --config results/config.yaml": "",
    "python -m resnet_ipu validate --config results/config.yaml --ckpt_path results/checkpoints/last.ckpt": "",
    "python -m resnet_ipu fit --help": "",
    "python -m resnet_ipu --size 50 --dataset IMAGENET --data-dir DIR --image-size 160 --on-bad-image skip": f"{_IMAGES} --epochs 1",
    "python -m resnet_ipu predict --ckpt_path results/checkpoints/last.ckpt": "",
    "python -m resnet_ipu --size 50 --dataset IMAGENET --data-dir SHARDS": _IMAGES,
    "python -m resnet_ipu --dataset IMAGENET --data-dir DIR --data-benchmark": _IMAGES,
    "python -m cifar_ipu --network estimator": f"{_CNN} 0.02",
    "python -m cifar_ipu --network estimator --replicas 2": f"{_CNN} 0.02",
    "python -m cifar_ipu --network estimator --pipeline --gradient-accumulation-count 8 --model-shard-position 7": f"{_CNN} 0.04 --batch-size 8",
    "python -m cosmoflow_ipu --num-ipus 2": _UNIVERSES,
    "python -m cosmoflow_ipu configs/small.yaml": _UNIVERSES,
    "python -m cosmoflow_ipu configs/graphcore.yaml --n-epochs 1": "--n-train 2 --sample-size 32 --conv-size 2",
    "python -m cosmoflow_ipu configs/mlperf.yaml --data-dir DIR": "--n-epochs 1 --conv-size 2 --micro-batch-size 1 --gradient-accumulation-factor 2",
    "python -m cosmoflow_ipu generate --output-dir DIR --n-train 1000": "--n-train 4 --n-valid 2 --oversample 1",
    "python -m cosmoflow_ipu show --index 3 --output universe.png": "--cells 16",
    "python -m resnet_ipu --size x50 --replication-factor 4": "--dataset SAMPLE --batch-size 4 --max-steps 1 --limit-val-batches 1"
    " --validation-micro-batch-size 8",
    "python benchmarks/loop_overhead.py": "--rounds 1 --updates 16",
    "python benchmarks/checkpoint.py --size 20 50": "--rounds 1 --size 8",
    "python benchmarks/stochastic_rounding.py": "--rounds 1 --millions 0.1",
}
# Benchmarks that start process after process to measure them apart: what they run is run above and in other tests.
MEASURED_APART = {
    "python benchmarks/train.py",
    "python benchmarks/pipeline.py --rounds 1 --stage-ms 2 10 30",
    "python benchmarks/recompute.py",
}
# "Add `--processes 2` to run the last two on two processes", under the table of cifar_ipu's original scripts.
ON_TWO = [f"{line} --processes 2" for line in SHRUNK if "--replicas 2" in line or "--model-shard-position 7" in line]
PROCESSES = [line for line in SHRUNK if "--processes 2" in line]


def published() -> list[str]:
    """The command lines of the README's tables and listings, in their order, each once."""
    found = []
    for line in README.splitlines():
        found += COMMAND.findall(line) if line.startswith("|") else []
        if line.startswith("python -m") or "/python -m resnet_ipu" in line:
            found.append(re.sub(r" +#.*|^.*\.venv/bin/(?=python -m)", "", line))
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The directory that all lines run in, with images in DIR, universes in UNIVERSES and a file of torchvision's weights."""
    folder = tmp_path_factory.mktemp("readme")
    make_tree(folder / "DIR")
    torch.save(torchvision.models.resnet50(num_classes=4).state_dict(), folder / "resnet50.pth")
    return folder


def words_of(line: str, added: str) -> list[str]:
    line = f"{line} {added}".replace("… ", "").replace("configs/mlperf.yaml --data-dir DIR", "configs/mlperf.yaml --data-dir UNIVERSES")
    return line.replace("generate --output-dir DIR", "generate --output-dir UNIVERSES").split()


def test_every_line_has_its_rule_and_every_row_of_what_to_type_its_line():
    assert set(published()) == set(SHRUNK) | MEASURED_APART
    table = README.partition("## What to type")[2].partition("##")[0]
    rows = [line for line in table.splitlines() if line.startswith("|") and line.strip("|- ")]
    assert rows and all(COMMAND.search(row) for row in rows)
    assert "Add `--processes 2` to run the last two on two processes" in README and len(ON_TWO) == 2


@pytest.mark.parametrize("line", [line for line in published() if line in SHRUNK and line not in PROCESSES and line[:5] != "torch"])
def test_a_published_line_runs(line, place, own_process, monkeypatch, capfd):
    monkeypatch.chdir(place)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    if "mlperf" in line:
        assert importlib.import_module("cosmoflow_ipu.__main__").main(words_of("generate --output-dir DIR", SHRUNK[GENERATE])) == 0
    if "--data-benchmark" in line:
        from resnet_ipu import throughput

        for rate in (throughput.loader_rate, throughput.network_rate):
            monkeypatch.setattr(rate, "__kwdefaults__", {"seconds": 0.05})
    words = words_of(line, SHRUNK[line])
    for _ in range(2 if "--resume" in line else 1):
        if words[1].startswith("benchmarks"):
            monkeypatch.setattr(sys, "argv", words[1:])
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
            status = 0
        else:
            try:
                status = importlib.import_module(f"{words[2]}.__main__").main(words[3:])
            except SystemExit as end:
                status = end.code
    output, errors = capfd.readouterr()
    assert not status and "Traceback" not in errors and output, errors
    assert "--resume" not in line or "already complete" in output


GENERATE = next(line for line in SHRUNK if " generate " in line)


def test_the_published_lines_of_two_processes_run_in_one_launch_by_torchrun(place):
    (torchrun,) = (line for line in SHRUNK if line.startswith("torchrun"))
    lines = [words_of(line, SHRUNK[line.removesuffix(" --processes 2") if line in ON_TWO else line]) for line in [*PROCESSES, *ON_TWO]]
    options, words = torchrun.split(" -m ")[0].split()[1:], words_of(torchrun.split(" -m ")[1], SHRUNK[torchrun])
    (place / "lines").write_text("".join(f"{json.dumps(line)}\n" for line in [words, *(line[2:] for line in lines)]))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, str(ROOT / "tests/published.py"), "lines"],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(re.findall(r"processes +2", done.stdout)) == 4, done.stdout
