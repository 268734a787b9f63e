"""Scale the loss so that small gradients do not vanish in 16 bits, and skip the weight updates whose gradients overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lightning_ipu.errors import UserError
from lightning_ipu.precision.rounding import OVERFLOW

AUTOMATIC = "auto"
_INITIAL_SCALE, _LARGEST_SCALE = 2.0**16, 2.0**24  # beyond, a loss of 1 is out of float16's reach a hundredfold
_GROWTH_INTERVAL = 2000
_PATIENCE = 50


class DivergenceError(UserError, FloatingPointError):
    """No scale makes the gradients finite: another learning rate, or another fixed scale, may."""


class LossScaling:
    """Multiplies the loss so that small gradients do not vanish in 16 bits, and divides the summed gradients again.

    A weight update whose gradients are not all finite is skipped as a whole, for all replicas and stages alike. A fixed scale stays; an
    automatic one halves then, and doubles after 2,000 updates in a row without (Micikevicius et al., 2018, with torch's figures).

    Args:
        scale: the fixed factor, or "auto".
        scaler: a GradScaler whose scale, factors and interval the automatic scale starts from.
        agree: makes one decision of all processes' own: called with whether this one's gradients are finite, returns whether all are.
    """

    def __init__(
        self, scale: float | str, *, scaler: torch.amp.GradScaler | None = None, agree: Callable[[bool], bool] | None = None
    ) -> None:
        if scale != AUTOMATIC and not (isinstance(scale, (int, float)) and 0 < scale < float("inf")):
            raise UserError(f"loss_scaling={scale!r} must be a number above 0 or 'auto'")
        self.automatic = scale == AUTOMATIC
        self.factor = _INITIAL_SCALE if self.automatic else float(scale)
        self._growth, self._backoff, self._interval = 2.0, 0.5, _GROWTH_INTERVAL
        if self.automatic and scaler is not None:
            self.factor, self._interval = scaler.get_scale(), scaler.get_growth_interval()
            self._growth, self._backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
        self.agree = agree
        self.skipped = 0  # weight updates of the run
        self._finite_in_a_row = self._skipped_in_a_row = 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to go backward from; the one that is reported stays as it is."""
        return loss * self.factor

    def unscale_and_check(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divide the gradients by the scale; False if any, in any process, is not finite: then they are useless and not touched."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for gradient in gradients:
            if gradient.dtype in OVERFLOW:
                raise TypeError(f"a scaled {gradient.dtype} gradient would lose on unscaling what scaling saved; keep gradients in float32")
        finite = not gradients or bool(torch.nn.utils.get_total_norm(gradients, float("inf")).isfinite())
        if self.agree is not None:
            finite = self.agree(finite)
        if finite and self.factor != 1 and gradients:
            torch._foreach_mul_(gradients, 1 / self.factor)
        return finite

    def update(self, finite: bool) -> None:
        """Count a weight update that was made (finite) or skipped, and move an automatic scale.

        Raises:
            DivergenceError: so many updates in a row were skipped that no scale can be the reason.
        """
        if not finite:
            self.skipped += 1
            self._finite_in_a_row, self._skipped_in_a_row = 0, self._skipped_in_a_row + 1
            if self.automatic:
                self.factor *= self._backoff
            if self._skipped_in_a_row == _PATIENCE:
                cause = "the training has diverged" if self.automatic else "the training has diverged, or the scale is too large"
                raise DivergenceError(
                    f"loss_scaling: gradients were not finite in {_PATIENCE} weight updates in a row, at a scale of {self.factor:g} now: {cause}"
                )
            return
        self._skipped_in_a_row = 0
        self._finite_in_a_row += 1
        if self.automatic and self._finite_in_a_row == self._interval:
            self.factor, self._finite_in_a_row = max(self.factor, min(self._growth * self.factor, _LARGEST_SCALE)), 0

    def state_dict(self) -> dict[str, float | int]:
        """What a checkpoint must hold."""
        return {
            "factor": self.factor,
            "skipped": self.skipped,
            "finite_in_a_row": self._finite_in_a_row,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Go on from `state_dict`; a fixed scale stays the one that was given."""
        if self.automatic:
            self.factor = float(state["factor"])
        self.skipped = int(state["skipped"])
        self._finite_in_a_row, self._skipped_in_a_row = int(state["finite_in_a_row"]), int(state["skipped_in_a_row"])
