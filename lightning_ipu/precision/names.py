"""Names of precision, <compute>.<weights>, what Lightning calls them, and which settings go together; imports no torch.

16.32 computes in 16 bits under autocast and keeps weights and optimizer state in float32. 16.16 keeps these in 16 bits too. The 16-bit
type is bfloat16, or on GPUs float16 by choice. What carries all this out is in plugin.py.
"""

from __future__ import annotations

from pathlib import Path

from lightning_ipu.errors import UserError

CHOICES = ("auto", "16.16", "16.32", "32.32", "16", "32")
HALF_TYPES = ("bf16", "fp16")

_SHORT = {"16": "16.16", "32": "32.32"}  # the older programs' spelling: one number for both
_LIGHTNING = {
    ("16.16", "bf16"): "bf16-true",
    ("16.16", "fp16"): "16-true",
    ("16.32", "bf16"): "bf16-mixed",
    ("16.32", "fp16"): "16-mixed",
    ("32.32", "bf16"): "32-true",
}
SIXTEEN_BIT = tuple(theirs for (name, _), theirs in _LIGHTNING.items() if name != "32.32")  # the Trainer's names of 16-bit computing


def refusal(precision: str, *, half_type: str = "bf16", accelerator: str | None = None) -> str | None:
    """Why ``precision`` cannot be had, in one line; None if it can. ``accelerator`` is ``"cpu"``, ``"gpu"`` or not known yet."""
    if precision not in CHOICES:
        return f"unknown precision {precision!r}; known are {', '.join(CHOICES)}"
    if half_type not in HALF_TYPES:
        return f"unknown 16-bit type {half_type!r}; known are {', '.join(HALF_TYPES)}"
    if half_type == "fp16":
        if full_name(precision) not in ("16.16", "16.32"):
            return f"16-bit type fp16 needs precision 16.16 or 16.32, not {precision}"
        if accelerator == "cpu":
            return "16-bit type fp16 is for GPUs; a CPU computes in bf16"
    return None


def resolve(precision: str, *, accelerator: str, half_type: str = "bf16") -> str:
    """Settle ``auto`` and the short spellings: ``16.16``, ``16.32`` or ``32.32``.

    ``auto`` is 16.32 where the device is fast at bfloat16 (a GPU of compute capability 8.0 or above, a CPU with AVX512_BF16 or AMX)
    and 32.32 elsewhere. ``accelerator`` is ``"cpu"`` or ``"gpu"``. Raises UserError for what is unknown or cannot be had.
    """
    if problem := refusal(precision, half_type=half_type, accelerator=accelerator):
        raise UserError(problem)
    if precision == "auto":
        return "16.32" if _fast_at_bfloat16(accelerator) else "32.32"
    return full_name(precision)


def scaling_refusal(precision: str, *, half_type: str, loss_scaling: float | str | None) -> str | None:
    """Why the gradients of a resolved ``precision`` cannot be scaled so, in one line; None if they can.

    ``loss_scaling`` is a fixed factor, ``"auto"``, or None for the precision's own habit.
    """
    if loss_scaling is None:
        return None
    if precision == "32.32":
        return f"loss_scaling={loss_scaling} makes no sense in precision 32.32: it saves 16-bit gradients from vanishing"
    if loss_scaling == "auto" and half_type == "bf16":
        return "loss_scaling=auto makes no sense in bf16, which has the range of 32-bit numbers: it needs fp16, or give a fixed factor"
    return None


def lightning_precision(precision: str, half_type: str = "bf16") -> str:
    """The Trainer's ``precision`` for a resolved name."""
    return _LIGHTNING[precision, half_type]


def name_and_type(trainer_precision: str) -> tuple[str, str] | tuple[None, None]:
    """The name and the 16-bit type for a Trainer's ``precision``: ``"bf16-mixed"`` is 16.32 in bf16. None for one that has no such name."""
    return next((names for names, theirs in _LIGHTNING.items() if theirs == trainer_precision), (None, None))


def full_name(precision: str) -> str:
    """A name without the older programs' short spellings."""
    return _SHORT.get(precision, precision)


def _fast_at_bfloat16(accelerator: str) -> bool:
    if accelerator == "cpu":
        try:
            flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
        except (OSError, StopIteration):
            return False
        return "avx512_bf16" in flags or "amx_bf16" in flags
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
