"""Averages of weights: an exponential moving average that follows the training, and averages of checkpoints made afterwards.

Both are ordinary weights: a checkpoint with an average holds it in its `state_dict`, under the plain names, so that whatever loads the
checkpoint gets the average; an entry says what it is. BatchNorm's running statistics belong to the weights that they
were gathered with, so they are averaged exactly as those are (as timm and torchvision do it). Other buffers keep their latest values: counters,
masks, tables of positions. Spectral norm's vectors are computed for the averaged weights (spectral.py). The alternative, estimating the
statistics anew on training data after averaging, costs a pass over it and is left to the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_ipu.cutting.tensors import tensor_places
from lightning_ipu.errors import UserError
from lightning_ipu.files import atomic_write, check_writable, read_checkpoint
from lightning_ipu.loop.position import weight_updates_in
from lightning_ipu.recipe.spectral import renewed_vectors, vectors_in

AVERAGE = "averaged_weights"  # in a checkpoint: an average that follows the training
TRAINED = "current_model_state"  # in a checkpoint: the weights that training goes on with, where its `state_dict` is the average
KEPT = "buffers_not_averaged"  # in a checkpoint: names of buffers that are not averaged
OF_CHECKPOINTS = "average_of_checkpoints"  # in a checkpoint that is an average of others: of which; no run resumes from it

_STATISTICS = ("running_mean", "running_var")  # of batch and instance norms, torch's and others'


class AveragedWeights(Callback):
    """Keeps an exponential moving average (EMA) of the weights during training, and has it validated.

    After every `every`-th weight update the average becomes d x average + (1 - d) x weights, BatchNorm's statistics included. It is kept in
    at least 32 bits, begins with the initial weights, and ends as the module's weights. It runs inside a host step, whatever the device
    iterations are; an update that an overflow skips is not counted. In a pipeline each process averages the stages it holds.

    A checkpoint holds the average as its `state_dict` and the trained weights beside it; a run that goes on from it finds both.

    Args:
        decay: d; an average over about 1 / (1 - d) steps.
        every: weight updates from one step of the average to the next.
        ramp: step n, from 0, takes min(d, (1 + n) / (10 + n)) for d, so that the initial weights are soon forgotten
            (the formula of TensorFlow's ExponentialMovingAverage).
        evaluate: what validations during training score and what a checkpoint's `state_dict` and the module after training are: the average,
            or the trained weights; then the average is only kept in the checkpoints, under `averaged_weights`.

    Raises:
        UserError: a number out of range.
    """

    def __init__(
        self, *, decay: float = 0.999, every: int = 1, ramp: bool = True, evaluate: Literal["average", "trained"] = "average"
    ) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"decay={decay} of AveragedWeights must be at least 0 and below 1")
        if every < 1:
            raise UserError(f"every={every} of AveragedWeights must be at least 1 weight update")
        if evaluate not in ("average", "trained"):
            raise UserError(f"evaluate={evaluate!r} of AveragedWeights is unknown; legal are 'average' and 'trained'")
        self.decay, self.every, self.ramp, self.evaluate = decay, every, ramp, evaluate
        self._average: dict[str, Tensor] | None = None  # by name, of what this process holds
        self._trained: dict[str, Tensor] = {}  # while a validation has the average in their place
        self._restored: dict[str, Any] | None = None
        self._steps, self._update = 0, 0  # steps of the average; the weight update that it has been told of last

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._places, self._buffers = _places(pl_module), _places(pl_module, averaged=False)
        holds = getattr(trainer.strategy, "holds", lambda name: True)
        self._buffers = {name: place for name, place in self._buffers.items() if holds(name)}
        held = {name: place for name, place in self._places.items() if holds(name)}
        restored = self._restored
        self._steps, self._update = (restored["steps"], restored["update"]) if restored else (0, trainer.global_step)
        self._average, averages, self._held = {}, {}, {}
        for name, (owner, key) in held.items():
            tensor = owner[key]
            if id(tensor) not in averages:  # tied weights have one average
                start = restored["average"].get(name, tensor.detach()) if restored else tensor.detach()
                dtype = torch.promote_types(tensor.dtype, torch.float32)
                averages[id(tensor)] = torch.empty_like(tensor, dtype=dtype, requires_grad=False).copy_(start)
                self._held[name] = owner, key
            self._average[name] = averages[id(tensor)]
        self._restored = None

    @override
    def on_before_zero_grad(self, trainer: pl.Trainer, *args: Any) -> None:
        self._follow(trainer)  # once between any two weight updates, also inside a host step

    @torch.no_grad()
    def _follow(self, trainer: pl.Trainer) -> None:
        """Take in the weights as the latest weight update left them, unless that has been done."""
        update = trainer.global_step
        if self._average is None or update == self._update:
            return
        self._update = update
        if update % self.every:
            return
        decay = min(self.decay, (1 + self._steps) / (10 + self._steps)) if self.ramp else self.decay
        averages = [self._average[name] for name in self._held]
        weights = [owner[key].to(average.dtype) for (owner, key), average in zip(self._held.values(), averages, strict=True)]
        torch._foreach_lerp_(averages, weights, 1 - decay)
        self._steps += 1

    # -- the average in the place of the trained weights

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._average is None or trainer.state.fn != TrainerFn.FITTING or self.evaluate != "average":
            return
        self._follow(trainer)
        shown = {name: self._average[name] for name in self._held} | self._renewed_vectors()
        for name, value in shown.items():
            owner, key = self._place(name)
            tensor = owner[key]
            self._trained[name], tensor.data = tensor.data, value.to(tensor.dtype)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._trained:
            return
        for name, trained in self._trained.items():
            owner, key = self._place(name)
            owner[key].data = trained
        self._trained = {}
        trainer.strategy.on_validation_end()  # what a pipeline fetched from other stages are averages: a checkpoint must not take them

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_validation_end(trainer, pl_module)  # a checkpoint that is written on the way out holds the trained weights as well

    @override
    @torch.no_grad()
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._average is not None and self.evaluate == "average":
            self._follow(trainer)
            average = self._whole(trainer, self._average)
            latest = pl_module.state_dict()
            for name, value in renewed_vectors(average, latest).items():
                latest[name].copy_(value)
            for name, (owner, key) in self._places.items():
                owner[key].copy_(average[name])
        self._average = None

    def _place(self, name: str) -> tuple[dict[str, Any], str]:
        return self._places[name] if name in self._places else self._buffers[name]

    def _renewed_vectors(self) -> dict[str, Tensor]:
        """Spectral norm's vectors for the average, for the weights that this process holds."""
        latest = {name: owner[key] for name, (owner, key) in (self._places | self._buffers).items()}
        return renewed_vectors(self._average, {name: value for name, value in latest.items() if name in self._average | self._buffers})

    # -- checkpoints

    def _whole(self, trainer: pl.Trainer, held: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the processes hold, as one dictionary in every process; all of them must call this."""
        return getattr(trainer.strategy, "merged", lambda held: held)(held)

    @override
    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._average is None:
            return
        self._follow(trainer)
        average = self._whole(trainer, self._average)
        checkpoint[AVERAGE] = {"decay": self.decay, "steps": self._steps, "update": self._update, "average": average}
        if self.evaluate == "average":
            trained = checkpoint["state_dict"]
            if self._trained:  # while a validation has the average in their place
                trained = trained | self._whole(trainer, self._trained)
            checkpoint[TRAINED] = trained
            averaged = {name: average[name].to(value.dtype) if name in average else value for name, value in trained.items()}
            # In 32 bits the very tensors of the average, which are written once.
            checkpoint["state_dict"] = averaged | renewed_vectors(average, trained)

    @override
    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if TRAINED in checkpoint:
            pl_module.load_state_dict(checkpoint[TRAINED], strict=pl_module.strict_loading)
        self._restored = checkpoint.get(AVERAGE)
        if self._restored is None:
            rank_zero_warn(
                "the checkpoint holds no average of weights by AveragedWeights: one begins here, with the weights trained so far"
            )


def _places(module: torch.nn.Module, *, averaged: bool = True) -> dict[str, tuple[dict[str, Any], str]]:
    """The dictionaries and keys of a module's parameters and running statistics, or of its other buffers; integers are left out.

    By name, since a forward may replace a buffer.
    """
    places = {}
    for name, owner, tensors, key in tensor_places(module):
        is_parameter = tensors is owner._parameters
        is_kept = tensors[key] is not None and _is_real(tensors[key]) and (is_parameter or key not in owner._non_persistent_buffers_set)
        if is_kept and (is_parameter or key in _STATISTICS) == averaged:
            places[name] = tensors, key
    return places


def kept_buffers(module: torch.nn.Module) -> list[str]:
    """Names of the floating-point buffers that are not averaged: an average keeps their latest values."""
    return list(_places(module, averaged=False))


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


# -- averages of checkpoints --------------------------------------------------------------------------------------------------


def description(checkpoint: dict[str, Any]) -> str | None:
    """What the weights of a checkpoint are an average of, in words; None for trained weights."""
    if OF_CHECKPOINTS in checkpoint:
        of = checkpoint[OF_CHECKPOINTS]
        kind = f"exponential average (decay {of['decay']:g})" if of["kind"] == "exponential" else "mean"
        return f"{kind} of {len(of['updates'])} checkpoints, after weight updates {', '.join(f'{update:,}' for update in of['updates'])}"
    if TRAINED in checkpoint and AVERAGE in checkpoint:
        return f"exponential moving average, decay {checkpoint[AVERAGE]['decay']:g}"
    return None


def average_checkpoints(
    paths: Sequence[Path], *, kind: Literal["mean", "exponential"] = "mean", decay: float = 0.99, last: int | None = None
) -> tuple[dict[str, Any], list[tuple[Path, int]], list[Path]]:
    """Average the weights of checkpoints of one run, ordered by the weight update at which each was saved.

    Parameters and BatchNorm's running statistics are averaged; other buffers are the newest checkpoint's. Tensors that are equal in all stay
    unchanged. Spectral norm's vectors are computed for the averaged weights.

    "mean" weighs all alike; "exponential" goes from the oldest to the newest and makes each the average's d x average + (1 - d) x weights.
    Sums are in float64; tensors keep their type; what is no floating-point number, such as BatchNorm's counters, is the newest
    checkpoint's. Averages made here earlier are left out, and a checkpoint under two names is taken once.

    Args:
        paths: files, in any order.
        decay: d.
        last: how many of the newest are averaged; None for all.

    Returns:
        A checkpoint for `validate`, `test` and `predict`, marked as an average, from which no training can resume; the files that it averages,
        with their numbers of weight updates; the files that were left out because they are averages themselves.

    Raises:
        UserError: a file is no checkpoint, there are fewer than asked for, or two do not fit together; it names them.
    """
    found, averages = _checkpoints_by_update(paths)
    updates = sorted(found)
    if len(updates) < (last or 1):
        left_out = f"; {len(averages)} more are averages themselves" if averages else ""
        are = "is 1 checkpoint" if len(updates) == 1 else f"are {len(updates)} checkpoints of different weight updates"
        raise UserError(f"there {are}, fewer than the {last or 1} asked for{left_out}; a run keeps that many with --keep-last {last or 1}")
    updates = updates[-last:] if last else updates

    newest_path, newest = found[updates[-1]]
    state = newest["state_dict"]
    for update in updates:
        _check_alike(found[update][0], found[update][1]["state_dict"], newest_path, state)
    kept = {*newest.get(KEPT, ()), *(name for _, *vectors in vectors_in(state) for name in vectors)}
    sums = {
        name: torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float64))
        for name, value in state.items()
        if _is_real(value) and name not in kept and any(not torch.equal(found[k][1]["state_dict"][name], value) for k in updates)
    }
    for number, update in enumerate(updates):
        for name, total in sums.items():
            weights = found[update][1]["state_dict"][name].to(total.dtype)
            if kind == "mean":
                total.add_(weights / len(updates))
            else:
                total.lerp_(weights, 1.0 if number == 0 else 1 - decay)
    averaged = {name: sums[name].to(value.dtype) if name in sums else value for name, value in state.items()}
    averaged |= renewed_vectors({name: value for name, value in averaged.items() if name not in kept}, state)
    resumable = ("optimizer_states", "lr_schedulers", "loops", "callbacks", AVERAGE, TRAINED)
    result = {name: value for name, value in newest.items() if name not in resumable}
    files = [(found[update][0], update) for update in updates]
    mark = {"kind": kind, "decay": decay, "updates": updates, "files": [path.name for path, _ in files]}
    return {**result, "state_dict": averaged, OF_CHECKPOINTS: mark}, files, averages


def _checkpoints_by_update(paths: Sequence[Path]) -> tuple[dict[int, tuple[Path, dict[str, Any]]], list[Path]]:
    """The checkpoints of a run by their weight updates, one of each, and the files that are averages themselves."""
    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    averages: list[Path] = []
    for path in sorted(paths):
        checkpoint = read_checkpoint(path)
        if OF_CHECKPOINTS in checkpoint:
            averages.append(path)
            continue
        update = weight_updates_in(checkpoint)
        if update in found and not _same(found[update][1]["state_dict"], checkpoint["state_dict"]):
            raise UserError(
                f"{found[update][0]} and {path} both stand after weight update {update:,} and differ: average one run at a time"
            )
        found.setdefault(update, (path, checkpoint))
    return found, averages


def write_average(given: dict[str, Any]) -> str:
    """Carry out the command `average`, whose options `command.options.AVERAGE_OPTIONS` lists; returns the lines to show.

    Raises:
        UserError, OSError: see `average_checkpoints`; or there is nothing at the given path.
    """
    source = Path(given.get("checkpoint_input_path", "results/checkpoints"))
    if not source.is_dir():
        raise UserError(f"--checkpoint-input-path {source}: there is no such directory")
    directory = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    paths = list(directory.glob("*.ckpt"))
    if not paths:
        raise UserError(f"--checkpoint-input-path {source}: there is no *.ckpt file in {directory}")
    kind, decay, last = given.get("weight_avg_strategy", "mean"), given.get("weight_avg_exp_decay", 0.99), given.get("weight_avg_N", -1)
    target = Path(given.get("checkpoint_output_path", directory / "averaged.ckpt"))
    if target.exists() and OF_CHECKPOINTS not in read_checkpoint(target):
        raise UserError(f"--checkpoint-output-path {target} is a checkpoint of a run, which would be lost; choose another name")
    check_writable(target.parent)
    checkpoint, files, averages = average_checkpoints(paths, kind=kind, decay=decay, last=None if last == -1 else last)
    with atomic_write(target) as file:
        torch.save(checkpoint, file)
    lines = [f"{path}: after weight update {update:,}" for path, update in files]
    lines += [f"{path}: left out, an average itself" for path in averages]
    return "\n".join([*lines, f"{target}: {description(checkpoint)}"])


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _check_alike(path: Path, state: dict[str, Tensor], newest_path: Path, newest: dict[str, Tensor]) -> None:
    for name in newest.keys() | state.keys():
        shapes = [tuple(tensors[name].shape) if name in tensors else "missing" for tensors in (state, newest)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"{path} and {newest_path} are of different networks: {name} is {shapes[0]} in one and {shapes[1]} in the other"
            )
