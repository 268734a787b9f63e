"""Round 32-bit numbers into 16 bits, up or down by chance, so that small changes are kept on average."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ipu.randomness import mix, name_word

_ROUNDING = name_word("stochastic rounding")

_FLOAT32_EXPONENT = 0x7F800000
# From here on a number is beyond what rounding can bring back: twice the largest power of two.
OVERFLOW = {torch.bfloat16: float("inf"), torch.float16: 65536.0}
# Elements rounded in one go: temporaries that fit the cache of a core, and large enough for a GPU.
_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 26}


def rounding_seed(seed: int, update: int, name: str, state: str = "") -> int:
    """The seed for rounding one tensor in one weight update: of a parameter, or of one entry of its optimizer state."""
    return mix(seed, _ROUNDING, update, name_word(name), name_word(state))


def stochastic_round_(target: Tensor, source: Tensor, *, generator: torch.Generator) -> Tensor:
    """Round float32 numbers into a bfloat16 or float16 tensor of the same shape, up or down by chance, so that the mean is exact.

    x between the neighbours a < b becomes b with probability (x - a) / (b - a). Numbers that have a 16-bit form are not moved, nor are
    infinities and NaNs. What lies between the largest finite number and the next power of two becomes the largest finite number,
    never infinity; beyond, as in float16 from 65536 on, it becomes infinity as in any conversion.
    """
    flat, out = _flat(source), _flat(target)
    if flat is None or out is None or source.stride() != target.stride():
        rounded = torch.empty(source.shape, dtype=target.dtype, device=source.device)
        return target.copy_(stochastic_round_(rounded, source.contiguous(), generator=generator))
    draw = _round_bfloat16 if target.dtype == torch.bfloat16 else _round_float16
    largest, overflow = torch.finfo(target.dtype).max, OVERFLOW[target.dtype]
    size = _BLOCK.get(source.device.type, 1 << 20)
    for start in range(0, flat.numel(), size):
        block = flat[start : start + size]
        rounded = draw(block, _noise(block.numel(), generator))
        if block.is_cuda or not _all_within(block, largest):  # looking first saves a CPU two passes, and would make a GPU wait
            rounded = torch.where(block.abs() < overflow, rounded.clamp_(-largest, largest), block)
        out[start : start + size].copy_(rounded)  # exact: the conversion finds nothing left to round
    return target


def stochastic_round(source: Tensor, dtype: torch.dtype, *, generator: torch.Generator) -> Tensor:
    """A bfloat16 or float16 copy of a float32 tensor; see `stochastic_round_`."""
    return stochastic_round_(torch.empty_like(source, dtype=dtype), source, generator=generator)


def _noise(count: int, generator: torch.Generator) -> Tensor:
    """Uniform 16-bit integers; four come from one 64-bit word, which is what makes drawing them cheap."""
    words = torch.empty((count + 3) // 4, dtype=torch.int64, device=generator.device).random_(-(1 << 63), None, generator=generator)
    return words.view(torch.int16)[:count]


def _round_bfloat16(numbers: Tensor, noise: Tensor) -> Tensor:
    """A bfloat16 is the upper half of a float32: add random 16 bits to the lower half, whose carry rounds away from 0, and cut it off."""
    bits = noise.to(torch.int32).bitwise_and_(0xFFFF).add_(numbers.view(torch.int32)).bitwise_and_(-0x10000)
    return bits.view(torch.float32)


def _round_float16(numbers: Tensor, noise: Tensor) -> Tensor:
    """Count |x| in units of its spacing, 2^(e - 10) or among subnormals 2^-24, and round that up where chance is below the fraction."""
    exponent = numbers.view(torch.int32).bitwise_and(_FLOAT32_EXPONENT).clamp_(min=(127 - 14) << 23)
    spacing = exponent.sub_(10 << 23).view(torch.float32)
    count = numbers.abs() / spacing  # exact: a power of two
    whole = count.floor()
    # Fractions of tiny subnormals need more than 16 bits: the neighbour's follow, seldom looked at, as low bits.
    upper, lower = noise.to(torch.float32).add_(32768), noise.roll(1).to(torch.float32).add_(32768)
    chance = lower.mul_(2.0**-16).add_(upper).mul_(2.0**-16)
    return torch.copysign(whole.add_(chance < count - whole).mul_(spacing), numbers)


def _all_within(numbers: Tensor, largest: float) -> bool:
    low, high = torch.aminmax(numbers)
    return bool(low >= -largest) and bool(high <= largest)  # a NaN is neither


def _flat(tensor: Tensor) -> Tensor | None:
    """A dense tensor as one row in the order of its memory, so that channels_last costs no copy; None for one with gaps or overlaps."""
    order = sorted(range(tensor.ndim), key=lambda dim: (tensor.stride(dim), tensor.size(dim)), reverse=True)
    tensor = tensor.permute(order)
    return tensor.view(-1) if tensor.is_contiguous() else None
