"""What stochastic rounding costs: CPU milliseconds for one weight update of so many parameters.

    python benchmarks/stochastic_rounding.py [--millions 25] [--rounds 5] [--threads 1]

The parameters lie in tensors of up to two million elements, as in a ResNet-50. "rounding alone" rounds one float32 tensor of each size;
the updates are SGD with momentum, whose 16.16 form rounds weights and momentum. Variants run in turn, round after round, in one
process; the table shows medians with the lowest and highest. Compare with the time of a whole weight update on the same machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_ipu import machine
from lightning_ipu.precision.plugin import SixteenBit
from lightning_ipu.precision.rounding import stochastic_round_

_LARGEST = 2_000_000


def sizes(total: int) -> list[int]:
    """Sizes of the tensors: a few large ones, and for each a short one such as a norm has."""
    whole, rest = divmod(total, _LARGEST + 512)
    return [_LARGEST, 512] * whole + [rest] * (rest > 0)


def rounding(total: int, dtype: torch.dtype | None) -> Callable[[int], None]:
    """Round every tensor once, stochastically, or to nearest where there is no type."""
    wide = [torch.randn(size) for size in sizes(total)]
    narrow = [torch.empty(tensor.shape, dtype=dtype or torch.bfloat16) for tensor in wide]
    generator = torch.Generator()

    def run(update: int) -> None:
        for target, source in zip(narrow, wide, strict=True):
            if dtype is None:
                target.copy_(source)
            else:
                stochastic_round_(target, source, generator=generator.manual_seed(update))

    return run


def weight_update(total: int, precision: str, **options: bool) -> Callable[[int], None]:
    """SGD with momentum over the parameters in a precision: Lightning's name of it."""
    plugin = SixteenBit(precision, device="cpu", **options)
    module = plugin.convert_module(nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes(total)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    narrow = plugin.narrow_update(optimizer, module, seed=0)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape)
    return narrow.step if narrow else lambda update: optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=25.0, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine.keep_freed_memory()  # as the commands do
    total = round(arguments.millions * 1e6)
    variants = {
        "rounding alone, to nearest (bfloat16)": rounding(total, None),
        "rounding alone, stochastic (bfloat16)": rounding(total, torch.bfloat16),
        "rounding alone, stochastic (float16)": rounding(total, torch.float16),
        "update in 16.32": weight_update(total, "bf16-mixed"),
        "update in 16.16, to nearest": weight_update(total, "bf16-true", stochastic_rounding=False),
        "update in 16.16, stochastic": weight_update(total, "bf16-true"),
    }
    milliseconds: dict[str, list[float]] = {name: [] for name in variants}
    for update in range(arguments.rounds + 1):
        for name, run in variants.items():
            start = time.process_time()
            run(update)
            if update:  # the first one warms up
                milliseconds[name].append((time.process_time() - start) * 1e3)

    title = f"{arguments.millions:g} million parameters, {arguments.threads} thread{'s' * (arguments.threads > 1)}, CPU time"
    table = Table("variant", "ms per weight update", "lowest - highest", title=title)
    for name, values in milliseconds.items():
        table.add_row(name, f"{statistics.median(values):.0f}", f"{min(values):.0f} - {max(values):.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
