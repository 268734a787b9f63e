"""16-bit weights that learn: updates widened to 32 bits one tensor at a time, stochastic rounding, loss scaling, Lightning's plugin.

In 16.16 the weights and the optimizer's state live in 16 bits; gradients are summed in 32, for sums of many micro-batches would not fit
into fewer. The alternative, 32-bit copies of all weights beside the 16-bit ones, is 16.32 and costs their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from typing_extensions import override

from lightning_ipu.plan import PlanError
from lightning_ipu.precision.layers import prepare
from lightning_ipu.precision.names import precision_name, scaling_refusal
from lightning_ipu.randomness import mix, name_word

__all__ = ["LossScaling", "SixteenBit", "SixteenBitUpdate", "rounding_seed", "stochastic_round", "stochastic_round_"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_ROUNDING = name_word("stochastic rounding")

# ---- Stochastic rounding ----------------------------------------------------------------------------------------------------------

_FLOAT32_EXPONENT = 0x7F800000
# From here on a number is beyond what rounding can bring back: twice the largest power of two.
_OVERFLOW = {torch.bfloat16: float("inf"), torch.float16: 65536.0}
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
    largest, overflow = torch.finfo(target.dtype).max, _OVERFLOW[target.dtype]
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


# ---- The weight update ------------------------------------------------------------------------------------------------------------

# Elements of parameters that an optimizer is given at once: small tensors share the cost of its step, large ones come alone.
_AT_ONCE = 1 << 20


class SixteenBitUpdate:
    """Steps an optimizer over 16-bit parameters as if they were 32-bit, without keeping 32-bit copies of them.

    A few tensors at a time, weights, gradients and state are widened to float32, the optimizer's own `step` runs on those alone, and
    weights and state are rounded back. The parameter objects stay the same throughout, so any optimizer that treats its tensors one
    by one works unmodified; one that couples them (a norm over all of them) would see a few at a time. State tensors of one element,
    such as step counters, stay as the optimizer made them. 32-bit parameters among the others are stepped as usual. From here on the
    gradients of 16-bit parameters are summed in float32.

    Args:
        optimizer: any but LBFGS; its `state_dict` is what it always was, in 16 bits.
        module: names the optimizer's parameters.
        seed: of the run.
        stochastic: round stochastically; False rounds to nearest, which loses every change below half a spacing.

    Raises:
        ValueError: a parameter of the optimizer is not the module's, so that it has no name.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, *, seed: int, stochastic: bool = True) -> None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        nameless = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
        if nameless:
            shapes = ", ".join(str(tuple(p.shape)) for p in nameless[:3])
            raise ValueError(
                f"the optimizer holds {len(nameless)} parameters that are not the module's (shapes {shapes}); 16.16 rounds parameters by name"
            )
        self._optimizer, self._names, self._seed, self._stochastic = optimizer, names, seed, stochastic
        # Frozen parameters as well: they may be unfrozen later.
        self._summed_in_32_bits = [p for p in names if p.dtype in _OVERFLOW and p.grad_dtype != torch.float32]
        for parameter in self._summed_in_32_bits:
            parameter.grad_dtype = torch.float32  # autograd casts every micro-batch's gradient before it adds
        self._generators: dict[torch.device, torch.Generator] = {}
        self._hooks = [
            optimizer.register_load_state_dict_pre_hook(self._note_scalars),
            optimizer.register_load_state_dict_post_hook(self._restore_scalars),
        ]

    def step(self, update: int) -> None:
        """Make the optimizer's step number `update` of the run; on the same weights and gradients it always gives the same."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        with _hooks_called_once(optimizer):
            try:
                for group in groups:
                    self._step_group(group, update)
            finally:
                optimizer.param_groups = groups

    def remove(self) -> None:
        """Take the hooks off the optimizer, and give the parameters gradients of their own type again."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._summed_in_32_bits:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)

    def _step_group(self, group: dict[str, Any], update: int) -> None:
        parameters = group["params"]
        # Some optimizers count their steps in the group: each portion must find, and together they must leave, one step.
        before = {name: value for name, value in group.items() if isinstance(value, (int, float))}
        self._optimizer.param_groups = [group]
        try:
            for portion in _portions(parameters):
                group.update(before)
                group["params"] = portion
                with self._widened(portion, update):
                    self._optimizer.step()
        finally:
            group["params"] = parameters

    @contextmanager
    def _widened(self, portion: list[nn.Parameter], update: int) -> Iterator[None]:
        states, narrow = self._optimizer.state, {}
        for parameter in portion:
            if parameter.dtype not in _OVERFLOW:
                continue
            weights, gradient = parameter.data, parameter.grad
            state = {key: value for key, value in states.get(parameter, {}).items() if _is_narrowed(value)}
            narrow[parameter] = weights, gradient, state
            if gradient.dtype != torch.float32:
                parameter.grad = None
            parameter.data = weights.float()
            parameter.grad = gradient.float()
            states[parameter].update({key: value.float() for key, value in state.items()})
        try:
            yield
        finally:
            for parameter, (weights, gradient, before) in narrow.items():
                name, state = self._names[parameter], states[parameter]
                self._narrow(weights, parameter.data, update, name, "")
                for key, wide in state.items():
                    if not _is_narrowed(wide):
                        continue
                    target = before.get(key)
                    if target is None or target.dtype != weights.dtype or target.shape != wide.shape:
                        target = torch.empty_like(wide, dtype=weights.dtype)
                    state[key] = self._narrow(target, wide, update, name, key)
                if not state:
                    del states[parameter]  # as the optimizer left it
                parameter.grad = None
                parameter.data = weights
                parameter.grad = gradient

    def _narrow(self, target: Tensor, source: Tensor, update: int, name: str, key: str) -> Tensor:
        if not self._stochastic:
            return target.copy_(source)
        device = source.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        generator = self._generators[device].manual_seed(rounding_seed(self._seed, update, name, key))
        return stochastic_round_(target, source, generator=generator)

    # torch gives every loaded state tensor but "step" the parameter's type. The scalars that the optimizer keeps beside it
    # (NAdam's and ASGD's) are not rounded here, and must not be by a restart.

    def _note_scalars(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._scalars = [
            (index, key, value)
            for index, state in state_dict["state"].items()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1
        ]

    def _restore_scalars(self, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, key, value in self._scalars:
            loaded = optimizer.state[parameters[index]][key]
            optimizer.state[parameters[index]][key] = value.to(loaded.device, copy=True)
        del self._scalars


def _is_narrowed(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1


def _portions(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters that have a gradient, in order, as many at a time as hold `_AT_ONCE` elements, and at least one."""
    portion: list[nn.Parameter] = []
    elements = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if portion and elements + parameter.numel() > _AT_ONCE:
            yield portion
            portion, elements = [], 0
        portion.append(parameter)
        elements += parameter.numel()
    if portion:
        yield portion


@contextmanager
def _hooks_called_once(optimizer: Optimizer) -> Iterator[None]:
    """Call an optimizer's step hooks before and after, when all parameters are in their groups, and not at its steps within."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    kept = [dict(of) for of in hooks]
    own_before, own_after, all_before, all_after = kept
    for hook in chain(all_before.values(), own_before.values()):
        if hook(optimizer, (), {}) is not None:
            raise ValueError("an optimizer's step hook that changes the step's arguments cannot be honoured in 16.16")
    for of in hooks:
        of.clear()
    try:
        yield
    finally:
        for of, hook in zip(hooks, kept, strict=True):
            of.update(hook)
    for hook in chain(own_after.values(), all_after.values()):
        hook(optimizer, (), {})


# ---- Loss scaling -----------------------------------------------------------------------------------------------------------------

AUTOMATIC = "auto"
_INITIAL_SCALE, _LARGEST_SCALE = 2.0**16, 2.0**24  # beyond, a loss of 1 is out of float16's reach a hundredfold
_GROWTH_INTERVAL = 2000
_PATIENCE = 50


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
            raise ValueError(f"loss_scaling={scale!r} must be a number above 0 or 'auto'")
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
            if gradient.dtype in _OVERFLOW:
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
            FloatingPointError: so many updates in a row were skipped that no scale can be the reason.
        """
        if not finite:
            self.skipped += 1
            self._finite_in_a_row, self._skipped_in_a_row = 0, self._skipped_in_a_row + 1
            if self.automatic:
                self.factor *= self._backoff
            if self._skipped_in_a_row == _PATIENCE:
                cause = "the training has diverged" if self.automatic else "the training has diverged, or the scale is too large"
                raise FloatingPointError(
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


# ---- Lightning's plugin -----------------------------------------------------------------------------------------------------------


def _scaler_refusal(scaler: torch.amp.GradScaler | None, loss_scaling: float | str | None) -> str | None:
    """Why the settings of a GradScaler cannot be used, in one line; None if they can."""
    if scaler is None:
        return None
    if type(scaler) not in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
        return f"scaler={type(scaler).__name__} has methods of its own, which would not be called; give a torch.amp.GradScaler, or loss_scaling"
    default = torch.amp.GradScaler("cpu").state_dict()
    if loss_scaling is not None and scaler.state_dict() != default:
        return f"loss_scaling={loss_scaling} contradicts the settings of the plugin's scaler; give one of the two"
    return None


class SixteenBit(Precision):
    """16-bit computing, over 32-bit weights (16.32) or 16-bit ones (16.16).

    Both compute under torch.autocast: convolutions and matrix products in 16 bits; losses, norms' statistics and the reductions that
    autocast lists in 32; batches and targets enter as the user made them.

    Args:
        precision: Lightning's name: bf16-mixed, 16-mixed (16.32), bf16-true or 16-true (16.16).
        device: cpu or cuda.
        loss_scaling: a fixed factor, "auto", or None, which is "auto" for float16 and no scaling for bfloat16.
        stochastic_rounding: of the weight update in 16.16.
        scaler: the GradScaler of Lightning's own plugin, whose settings "auto" starts from; a disabled one means no scaling.

    Raises:
        ValueError: the settings make no sense together.
    """

    def __init__(
        self,
        precision: str,
        *,
        device: str,
        loss_scaling: float | str | None = None,
        stochastic_rounding: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if (named := precision_name(precision)) not in ("16.16", "16.32"):
            raise ValueError(f"precision={precision!r} is not one of bf16-mixed, 16-mixed, bf16-true and 16-true")
        half_type = "bf16" if precision.startswith("bf16") else "fp16"
        if problem := scaling_refusal(named, half_type=half_type, loss_scaling=loss_scaling):
            raise ValueError(problem)
        self.precision, self.device, self.stochastic_rounding = precision, device, stochastic_rounding
        self.dtype = DTYPES[half_type]
        self.narrow_weights = named == "16.16"
        if problem := _scaler_refusal(scaler, loss_scaling):
            raise ValueError(problem)
        if loss_scaling is None and half_type == "fp16" and (scaler is None or scaler.is_enabled()):
            loss_scaling = AUTOMATIC
        self.scaling = None if loss_scaling is None else LossScaling(loss_scaling, scaler=scaler)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Make a network's parameters 16-bit; buffers, such as norms' running statistics, stay as they are."""
        if not self.narrow_weights:
            return module
        for name, parameter in module.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise PlanError(f"{name!r} has no shape yet, and so cannot be in 16 bits: run a batch through the network first")
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.dtype)
        prepare(module)
        return module

    def narrow_update(self, optimizer: Optimizer, module: nn.Module, *, seed: int) -> SixteenBitUpdate | None:
        """What makes this precision's weight updates; None where the optimizer's own `step` does."""
        if not self.narrow_weights:
            return None
        return SixteenBitUpdate(optimizer, module, seed=seed, stochastic=self.stochastic_rounding)

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with torch.autocast(self.device, dtype=self.dtype, cache_enabled=False):
            yield

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaling is None else self.scaling.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaling is not None:
            self.scaling.load_state_dict(state_dict)
