"""Names of precision, <compute>.<weights>, and what Lightning calls them: 16.16, 16.32 and 32.32.

16.32 computes in bfloat16 under autocast and keeps weights, gradients' sums and optimizer state in float32. 16.16, half-precision
weights with stochastic rounding, is not available yet.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHOICES", "lightning_precision", "precision_name", "resolve"]

CHOICES = ("auto", "16.16", "16.32", "32.32", "16", "32")

_SHORT = {"16": "16.16", "32": "32.32"}  # the older programs' spelling: one number for both
_LIGHTNING = {"16.32": "bf16-mixed", "32.32": "32-true"}


def refusal(precision: str) -> str | None:
    """Why ``precision`` cannot be had, in one line; None if it can."""
    if precision not in CHOICES:
        return f"unknown precision {precision!r}; known are {', '.join(CHOICES)}"
    if _SHORT.get(precision, precision) == "16.16":
        return f"precision {precision} (16-bit weights) is not available yet; use 16.32, which keeps 32-bit weights, or 32.32"
    return None


def resolve(precision: str, *, accelerator: str) -> str:
    """Settle ``auto`` and the short spellings: ``16.32`` or ``32.32``.

    ``auto`` is 16.32 where the device is fast at bfloat16 (a GPU of compute capability 8.0 or above, a CPU with AVX512_BF16 or AMX)
    and 32.32 elsewhere. ``accelerator`` is ``"cpu"`` or ``"gpu"``. Raises ValueError for what is unknown or not available yet.
    """
    if problem := refusal(precision):
        raise ValueError(problem)
    if precision == "auto":
        return "16.32" if _fast_at_bfloat16(accelerator) else "32.32"
    return _SHORT.get(precision, precision)


def lightning_precision(precision: str) -> str:
    """The Trainer's ``precision`` for a resolved name."""
    return _LIGHTNING[precision]


def precision_name(trainer_precision: str) -> str | None:
    """The name for a Trainer's ``precision`` (``"bf16-mixed"`` is 16.32); None for one that has no such name."""
    return next((name for name, theirs in _LIGHTNING.items() if theirs == trainer_precision), None)


def _fast_at_bfloat16(accelerator: str) -> bool:
    if accelerator == "cpu":
        try:
            flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
        except (OSError, StopIteration):
            return False
        return "avx512_bf16" in flags or "amx_bf16" in flags
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
