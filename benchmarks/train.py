"""Training speed of `python -m resnet_ipu` beside a hand-written PyTorch loop with the same settings.

    python benchmarks/train.py [--size 20 50] [--rounds 3]

For each size the command and the loop run in turn, round after round, each in a fresh process, on the embedded sample: the same network,
batch, crops and flips, optimizer, learning rates, memory format, bfloat16 autocast where the CPU is fast at it, threads and allocator
setting. Both count from the first micro-batch to the last. The table shows medians over rounds with the lowest and highest, and the
median of the rounds' ratios.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

SETTINGS = {"8": (128, 60), "20": (128, 45), "18": (32, 30), "50": (16, 25), "x50": (16, 25)}  # size: (batch, weight updates)


def plain_loop(size: str, batch: int, updates: int) -> float:
    """Train as an expert would by hand; returns samples per second."""
    import torch

    from cifar_ipu.data import load_images, random_crop_and_flip, random_words
    from lightning_ipu import machine
    from lightning_ipu.precision.names import resolve
    from resnet_ipu.networks import resnet

    machine.keep_freed_memory()
    machine.set_threads()
    torch.manual_seed(0)
    images, labels = load_images("SAMPLE", data_dir=".")["train"]
    network = resnet(size, num_classes=10, in_channels=1, zero_init_last_norm=True).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / updates)
    bfloat16 = resolve("auto", accelerator="cpu") == "16.32"
    done, epoch, start = 0, 0, time.perf_counter()
    while done < updates:
        for chosen in torch.randperm(len(images)).split(batch)[: len(images) // batch]:
            words = random_words(0, epoch, indices=chosen.numpy())
            inputs = random_crop_and_flip(images[chosen], words, flip=True)
            inputs = inputs.to(torch.float32, memory_format=torch.channels_last).div_(255 * 0.353).sub_(0.286 / 0.353)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                outputs = network(inputs)
            torch.nn.functional.cross_entropy(outputs.float(), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
            done += 1
            if done == updates:
                break
        epoch += 1
    return updates * batch / (time.perf_counter() - start)


def command(size: str, batch: int, updates: int) -> float:
    """Train through the command; returns the samples per second that it reports."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--dataset", "SAMPLE", "--size", size, "--batch-size", str(batch), "--max-steps", str(updates), "--no-validation"]
        run = subprocess.run(
            [sys.executable, "-m", "resnet_ipu", *options, "--output-dir", folder], capture_output=True, text=True, check=False
        )
    if run.returncode:
        sys.exit(f"python -m resnet_ipu {' '.join(options)} failed:\n{run.stderr}")
    return float(re.search(r"throughput: ([\d.]+) samples/sec", run.stdout)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=list(SETTINGS), default=["20", "50"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)  # the hand-written loop, in a process of its own
    arguments = parser.parse_args()
    if arguments.plain:
        print(plain_loop(arguments.size[0], *SETTINGS[arguments.size[0]]))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table("size", "batch", "hand-written, samples/s", "python -m resnet_ipu, samples/s", "ratio", title=f"{os.cpu_count()} cores")
    for size in arguments.size:
        ours, plain = [], []
        for _ in range(arguments.rounds):
            baseline = subprocess.run([sys.executable, __file__, "--plain", "--size", size], capture_output=True, text=True, check=True)
            plain.append(float(baseline.stdout))
            ours.append(command(size, *SETTINGS[size]))
        ratios = [mine / theirs for mine, theirs in zip(ours, plain, strict=True)]
        cells = [f"{statistics.median(v):.1f} ({min(v):.1f} - {max(v):.1f})" for v in (plain, ours)]
        table.add_row(size, str(SETTINGS[size][0]), *cells, f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})")
    Console().print(table)


if __name__ == "__main__":
    main()
