"""The README and the pages in docs/: every command line in them runs, shrunk by added options; links lead somewhere; nothing is said twice."""

import argparse
import ast
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
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/README.md"]}
README = PAGES[ROOT / "README.md"]
COMMAND = re.compile(r"`((?:torchrun --nproc|python -m \w+_ipu|python benchmarks/)[^`]*)`")

_RESNET = "--dataset SAMPLE --micro-batch-size 8 --limit-val-batches 1 --validation-micro-batch-size 8 --precision 32.32 --weight-updates-per-epoch"
_ONE, _TWO = f"{_RESNET} 1 --epochs 1", f"{_RESNET} 2"
_IMAGES = "--size 8 --image-size 16 --micro-batch-size 8 --max-steps 1 --num-workers 0 --precision 32.32"
_CNN = "--dataset SAMPLE --precision 32.32 --epochs"
_UNIVERSES = "--n-train 4 --n-valid 1 --n-epochs 1 --oversample 1 --precision 32.32 --conv-size 2 --micro-batch-size 2"

# What is added to each line so that it takes about a second: later options win. They run in this order, in one directory.
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
    "python -m resnet_ipu": _ONE,
    "python -m resnet_ipu fit --model flowers.Net --data flowers.Data --trainer.max_epochs 1": "--trainer.default_root_dir own",
    "python -m resnet_ipu fit --model lightning_ipu.ImageClassifier --model.network flowers.Network --data.dataset SAMPLE": (
        "--trainer.max_steps 1 --trainer.limit_val_batches 1 --trainer.default_root_dir own_network"
    ),
    "python -m resnet_ipu --size 8 --epochs 3 --keep-last 3": f"{_RESNET} 1",
    "python -m resnet_ipu fit --config resnet50_torchvision_v1 --data.data_dir DIR": (
        "--data.image_size 32 --data.eval_image_size 32 --data.eval_resize 36 --data.micro_batch_size 2 --data.num_workers 0 --trainer.max_steps 1"
        " --trainer.limit_val_batches 1 --trainer.strategy.gradient_accumulation_factor 1 --trainer.strategy.replication_factor 1"
        " --trainer.default_root_dir recipe"
    ),
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
    "python -m resnet_ipu --help-all": "",
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
    "python benchmarks/universe.py": "--rounds 1",
}
# Benchmarks that take long, or start process after process: their options are read, and what they run is run above and in other tests.
MEASURED_APART = {
    "python benchmarks/train.py",
    "python benchmarks/pipeline.py --rounds 1 --stage-ms 2 10 30",
    "python benchmarks/recompute.py",
    "python benchmarks/images.py",
    "python benchmarks/tfrecord.py",
    "python benchmarks/cosmoflow.py",
    "python benchmarks/busy.py --busy 0 --rounds 3",
}
FLOWERS = """
from pytorch_lightning.demos.boring_classes import BoringDataModule as Data, BoringModel as Net
from torch import nn


class Network(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(28 * 28, 10))
"""
# "Add `--processes 2` to run the last two on two processes", under the table of cifar_ipu's original scripts.
ON_TWO = [f"{line} --processes 2" for line in SHRUNK if "--replicas 2" in line or "--model-shard-position 7" in line]
PROCESSES = [line for line in SHRUNK if "--processes 2" in line]


def published() -> list[str]:
    """The command lines of the README and of docs/, in their order, each once."""
    found = []
    for line in (line for page in PAGES.values() for line in page.splitlines()):
        found += COMMAND.findall(line)
        if line.startswith("python -m") or "/python -m resnet_ipu" in line:
            found.append(re.sub(r" +#.*|^.*\.venv/bin/(?=python -m)", "", line))
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The directory that all lines run in, with images in DIR, universes in UNIVERSES and a file of torchvision's weights."""
    folder = tmp_path_factory.mktemp("readme")
    make_tree(folder / "DIR")
    (folder / "flowers.py").write_text(FLOWERS)
    torch.save(torchvision.models.resnet50(num_classes=4).state_dict(), folder / "resnet50.pth")
    return folder


def words_of(line: str, added: str) -> list[str]:
    line = f"{line} {added}".replace("… ", "").replace("configs/mlperf.yaml --data-dir DIR", "configs/mlperf.yaml --data-dir UNIVERSES")
    return line.replace("generate --output-dir DIR", "generate --output-dir UNIVERSES").split()


def test_every_line_has_its_rule_and_every_row_of_what_to_type_its_line():
    rules = set(SHRUNK) | MEASURED_APART
    assert set(published()) == rules, f"give these a rule, or publish them: {set(published()) ^ rules}"
    table = README.partition("## What to type")[2].partition("##")[0]
    rows = [line for line in table.splitlines() if line.startswith("|") and line.strip("|- ")]
    assert rows and all(COMMAND.search(row) for row in rows)
    assert any("Add `--processes 2` to run the last two on two processes" in page for page in PAGES.values()) and len(ON_TWO) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        assert not heading or heading in headings(PAGES[file]), f"{page.name} links to {target}: {name or page.name} has no such heading"


def test_the_readme_is_short_and_every_page_is_linked_from_the_index():
    assert len(README.splitlines()) <= 150
    index = PAGES[ROOT / "docs/README.md"]
    assert not [page.name for page in PAGES if page.parent.name == "docs" and page.name != "README.md" and f"({page.name}" not in index]


def test_no_sentence_stands_in_two_places():
    seen = {}
    for page, text in PAGES.items():
        for sentence in sentences(text):
            assert sentence not in seen, f"{page.name} says again what {seen[sentence]} says: {sentence}"
            seen[sentence] = page.name


def test_the_messages_of_troubleshooting_are_those_of_the_code():
    sources = (ast.parse(path.read_text()) for path in ROOT.glob("*_ipu/**/*.py"))
    texts = "\n".join(
        node.value for tree in sources for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    rows = [line.split(" | ")[0] for line in PAGES[ROOT / "docs/troubleshooting.md"].splitlines() if line.startswith("| `")]
    parts = [part for row in rows for message in re.findall("`([^`]+)`", row) for part in message.split("…")]
    assert rows and not [part for part in parts if part.strip() not in texts]


def headings(text: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    found = re.findall(r"^#+ +(.+?) *$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def sentences(text: str) -> list[str]:
    """The sentences of prose and lists, those of a few words left out."""
    prose = "\n".join("" if line.startswith(("|", "#")) else re.sub(r"^ *[*-] ", "\n", line) for line in text.splitlines())
    paragraphs = re.sub(r"```.*?```", "", prose, flags=re.DOTALL).split("\n\n")
    found = (sentence for paragraph in paragraphs for sentence in re.split(r"(?<=[.:]) ", " ".join(paragraph.split())))
    return [sentence for sentence in found if len(sentence) > 60]


@pytest.mark.parametrize("line", sorted(MEASURED_APART))
def test_a_benchmark_that_is_measured_apart_takes_its_published_options(line, monkeypatch):
    monkeypatch.setattr(sys, "argv", line.split()[1:])
    read = argparse.ArgumentParser.parse_args

    def only_read(parser):
        read(parser)
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_read)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / line.split()[1]), run_name="__main__")
    assert end.value.code == 0


@pytest.mark.parametrize("line", [line for line in SHRUNK if line in published() and line not in PROCESSES and line[:5] != "torch"])
def test_a_published_line_runs(line, place, own_process, monkeypatch, capfd):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)  # as `python -m` has the current directory
    monkeypatch.delitem(sys.modules, "flowers", raising=False)  # of another test
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
