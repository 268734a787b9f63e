"""Training speed on a quiet and on a busy machine, by how OpenMP's threads wait for one another.

    python benchmarks/busy.py [--network x50 20 8 cosmoflow] [--busy 0 1 2] [--spins 1000] [--seconds 8] [--rounds 1]

A plain PyTorch loop (bfloat16 where the CPU is fast at it, channels last, kept memory) trains one random micro-batch again and again, each
variant in a fresh process, in turn, beside 0, 1 or 2 processes that only count. libgomp's threads spin while they wait for one another; a thread
that spins for one whose core is taken burns the time that the other needs. The variants: `as it is` (libgomp's own choice), a spin bounded at
1,000 turns (GOMP_SPINCOUNT, what the commands set), no spin (OMP_WAIT_POLICY=PASSIVE) and one thread. Samples per second of wall time, median of the
rounds; in brackets the median of the rounds' ratios to `as it is`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

MICRO_BATCHES = {"x50": 8, "50": 8, "20": 128, "8": 32, "cosmoflow": 8}
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def measure(name: str, seconds: float) -> float:
    """Train in this process for so many seconds after two weight updates; returns samples per second."""
    import torch
    from torch.nn import functional as F

    from cosmoflow_ipu.networks import cosmoflow
    from lightning_ipu import machine
    from lightning_ipu.precision.names import resolve
    from resnet_ipu.networks import resnet

    machine.keep_freed_memory()
    machine.set_threads()
    torch.manual_seed(0)
    batch = MICRO_BATCHES[name]
    if name == "cosmoflow":
        model, inputs = cosmoflow("cosmoflow", input_size=32), torch.randn(batch, 4, 32, 32, 32)
        model, inputs = (part.to(memory_format=torch.channels_last_3d) for part in (model, inputs))
        targets = torch.rand(batch, 4)
    else:
        model, inputs = resnet(name, num_classes=10, in_channels=1, zero_init_last_norm=True), torch.randn(batch, 1, 28, 28)
        model, inputs = (part.to(memory_format=torch.channels_last) for part in (model, inputs))
        targets = torch.randint(10, (batch,))
    loss_of = F.mse_loss if name == "cosmoflow" else F.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    bfloat16 = resolve("auto", accelerator="cpu") == "16.32"
    updates, start = -2, time.perf_counter()
    while updates < 2 or time.perf_counter() - start < seconds:
        if updates == 0:
            start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            outputs = model(inputs)
        loss_of(outputs.float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
    return updates * batch / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", choices=list(MICRO_BATCHES), default=["x50", "20", "8", "cosmoflow"])
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 2], help="processes that only count beside the run")
    parser.add_argument("--spins", nargs="+", type=int, default=[1000], help="bounds of the spin to try")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # one measurement, in a process of its own
    arguments = parser.parse_args()
    if arguments.measure:
        print(measure(arguments.network[0], arguments.seconds))
        return

    from rich.console import Console
    from rich.table import Table

    variants: dict[str, dict[str, str]] = {"as it is": {}}
    variants |= {f"spin {turns:,}": {"GOMP_SPINCOUNT": str(turns)} for turns in arguments.spins}
    variants |= {"no spin": {"OMP_WAIT_POLICY": "PASSIVE"}, "one thread": {"OMP_NUM_THREADS": "1"}}
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    table = Table("network", "busy processes", *variants, title=f"samples/s, {os.cpu_count()} logical CPUs")
    for busy in arguments.busy:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        try:
            for name in arguments.network:
                rates: dict[str, list[float]] = {variant: [] for variant in variants}
                for _ in range(arguments.rounds):
                    for variant, values in rates.items():
                        words = [sys.executable, __file__, "--measure", "--network", name, "--seconds", str(arguments.seconds)]
                        done = subprocess.run(
                            words, env=environment | variants[variant], capture_output=True, text=True, check=True, timeout=900
                        )
                        values.append(float(done.stdout))
                cells = []
                for values in rates.values():
                    ratios = [value / base for value, base in zip(values, rates["as it is"], strict=True)]
                    cells.append(f"{statistics.median(values):.1f} ({statistics.median(ratios):.2f})")
                table.add_row(name, str(busy), *cells)
        finally:
            for other in others:
                other.kill()
                other.wait()
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
