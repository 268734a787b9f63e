"""What the user's steps log: a `self.log` inside a micro-batch costs a list append.

Lightning's own `self.log` takes about 0.5 ms. Here a call is only noted; once per host step the values are averaged, weighted by
samples, in float64 and in the order of the calls, and one real `self.log` per name passes the result to Lightning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import zip_longest
from numbers import Number
from typing import Any, NamedTuple

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.trainer.connectors.logger_connector.fx_validator import _FxValidator
from torch import nn
from torchmetrics import Metric

from lightning_ipu.errors import UserError
from lightning_ipu.loop.batches import samples_in
from lightning_ipu.loop.metrics import Gather, metrics_of, set_aside, unchanged_metrics
from lightning_ipu.plan import PlanError

# The parameters of LightningModule.log behind `name` and `value`, in their order, and what stands for them where they are not given.
_OPTIONS = {
    "prog_bar": False,
    "logger": None,
    "on_step": None,
    "on_epoch": None,
    "reduce_fx": "mean",
    "enable_graph": False,
    "sync_dist": False,
    "sync_dist_group": None,
    "add_dataloader_idx": True,
    "batch_size": None,
    "metric_attribute": None,
    "rank_zero_only": False,
}
_KEPT = "value", "cumulated_batch_size"  # of Lightning's _ResultMetric: what is logged in a hook outside of steps


class _Average:
    """Running reduction of one logged name over an epoch."""

    def __init__(self) -> None:
        self.weighted, self.weight, self.total, self.low, self.high = 0.0, 0.0, 0.0, float("inf"), float("-inf")

    def add(self, value: float, weight: float) -> None:
        self.weighted += value * weight
        self.weight += weight
        self.total += value
        if value == value:
            self.low, self.high = min(self.low, value), max(self.high, value)
        else:
            self.low = self.high = value  # NaN stays, as in torch.minimum

    def reduced(self, kind: str) -> float:
        """The value under Lightning's `reduce_fx`: mean (over samples), or sum, min or max (over calls); it refuses any other itself."""
        if kind == "mean":
            return self.weighted / self.weight
        return {"sum": self.total, "min": self.low, "max": self.high}[kind]


# One call of self.log: hook, name, value, options, weight, weight update in the host step, micro-batch in the epoch
_Logged = tuple[str | None, str, Any, dict[str, Any], float, int, int]
_Call = tuple[Any, float, int, int]  # value, weight and the two numbers of a _Logged
# hook, name, options, sums of an average or Lightning's values of a hook, path of a metric, last value logged for a step
_Saved = tuple[str, str, dict[str, Any], dict[str, Any] | None, str | None, float | None]


class _Forwarded(NamedTuple):
    """A torchmetrics Metric that was logged, and what its last forward gave: the value of that step."""

    metric: Metric
    step: torch.Tensor | None


class LogRecorder:
    """Takes the place of `module.log` while steps run, then passes what they logged to Lightning, once.

    Args:
        module: whose `log` is replaced.
        latest: receives the last value of each name, for a display that reads it while a host step runs.
        gather: returns every process's value of something, by rank; None in a single process.
        last_stage_rank: rank of the process with the last stage of the first replica. Hooks of a weight update log in every process; its
            values count.
    """

    def __init__(
        self, module: LightningModule, latest: dict[str, Any] | None = None, *, gather: Gather | None = None, last_stage_rank: int = 0
    ) -> None:
        self.module, self._gather, self._last_stage_rank = module, gather, last_stage_rank
        self.latest = {} if latest is None else latest
        self.drawn: int | None = None  # samples that a sampler gave for the micro-batch
        self.update, self.number = 0, 0  # of the weight update in the host step, of the micro-batch in the epoch
        self._batch: Any = None
        self._size: int | None = None
        self.hook: str | None = None
        self.muted = self._recording = False
        self._logged: list[_Logged] = []
        self._sums: dict[tuple[str, str], _Average] = {}
        self._options: dict[tuple[str, str], dict[str, Any]] = {}
        self._results: dict[tuple[str, str], Any] = {}
        self._metrics: dict[tuple[str, str], Metric] = {}

    def begin_batch(self, batch: Any, number: int) -> None:
        """Called before the step runs on a micro-batch."""
        self.number, self._batch, self._size = number, batch, None

    def begin_epoch(self) -> None:
        """Forget the averages of the last epoch."""
        self._sums.clear()
        self._options.clear()
        self._results.clear()
        self._metrics.clear()

    def state_dict(self) -> list[_Saved]:
        """What has been logged in the part of the epoch that is done, in plain types; options that are none are left out."""
        paths = {id(child): path for path, child in self.module.named_modules()}
        results = self.module.trainer.fit_loop.epoch_loop._results
        state: list[_Saved] = []

        def add(hook: str, name: str, options: dict[str, Any], sums: dict[str, Any] | None, metric: Metric | None) -> None:
            options = {**options, "reduce_fx": _kind(options.get("reduce_fx", "mean"))}
            if all(isinstance(value, (str, bool, int, float, type(None))) for value in options.values()):
                last = getattr(results.get(f"{hook}.{name}"), "_forward_cache", None) if options.get("on_step") else None
                state.append((hook, name, options, sums, metric and paths.get(id(metric)), None if last is None else float(last)))

        for (hook, name), options in self._options.items():
            sums = self._sums.get((hook, name))
            add(hook, name, options, vars(sums).copy() if sums else None, self._metrics.get((hook, name)))
        for result in results.values():  # what hooks outside of steps have logged to Lightning directly
            meta = result.meta
            if not result.has_reset and (meta.fx, meta.name) not in self._options:
                kept = {name: getattr(result, name).cpu().clone() for name in _KEPT if result.is_tensor and hasattr(result, name)}
                options = {name: getattr(meta, name) for name in ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")}
                add(meta.fx, meta.name, options, kept or None, None if result.is_tensor else result.value)
        return state

    def load_state_dict(self, state: list[_Saved]) -> None:
        """Go on from `state_dict`, and tell Lightning of it: the epoch may end with nothing more being logged."""
        fx_before = self.module._current_fx_name
        try:
            for hook, name, options, sums, metric, last in state:
                self.module._current_fx_name, kind = hook, options["reduce_fx"]
                options = {key: value for key, value in options.items() if key != "reduce_fx" or value != "mean"}
                if metric is not None:
                    self._metrics[hook, name] = self.module.get_submodule(metric)
                    LightningModule.log(self.module, name, self._metrics[hook, name], **options)
                elif sums is not None and _KEPT[0] in sums:
                    LightningModule.log(self.module, name, sums[_KEPT[0]], batch_size=1, **options)
                    vars(self._result_of(hook, name, options)).update({key: value.to(self.module.device) for key, value in sums.items()})
                elif sums is not None:
                    self._options[hook, name], self._sums[hook, name] = options, (total := _Average())
                    vars(total).update(sums)
                    self._put(hook, name, options, torch.tensor(total.reduced(kind), dtype=torch.float64), kind)
                if last is not None:
                    self._result_of(hook, name, options)._forward_cache = torch.tensor(last, dtype=torch.float64)
        finally:
            self.module._current_fx_name = fx_before

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Take the place of `LightningModule.log` for the module, below a `log` of its own."""
        original = LightningModule.log

        def log(module: LightningModule, *arguments: Any, **options: Any) -> None:
            (self.log if module is self.module else partial(original, module))(*arguments, **options)

        LightningModule.log = log
        self._recording = True
        try:
            yield
        finally:
            LightningModule.log = original
            self._recording = False

    def forget_from(self, update: int) -> None:
        """Drop what was logged from this weight update of the host step on: an error has ended it."""
        self._logged = [call for call in self._logged if call[5] < update]

    @property
    def recording_hook(self) -> str | None:
        """The hook or step that runs within a host step; None outside of host steps."""
        return (self.hook or "training_step") if self._recording else None

    @property
    def in_step(self) -> bool:
        """Whether a step runs, not a hook between steps."""
        return self._recording and self.hook is None

    def log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        """Note one call of `self.log`; same parameters as LightningModule.log."""
        if self.muted:
            return
        if arguments:
            options.update(zip(_OPTIONS, arguments, strict=False))
        if self._gather is not None:  # what Lightning is told is over all processes already
            options.pop("sync_dist", None)
        weight = options.pop("batch_size", None)
        if weight is None:
            weight = self._weight()
        self.latest[name] = value
        if isinstance(value, torch.Tensor):
            # Its value now: it may be changed in place, a parameter by the optimizer. An accelerator is not waited for.
            is_number = value.is_cpu and value.numel() == 1
            self.latest[name] = value = value.item() if is_number else value.detach().clone()
        elif isinstance(value, Metric):
            value = _Forwarded(value, value._forward_cache)
            self.latest[name] = value.step
        self._logged.append((self.hook, name, value, options, weight, self.update, self.number))

    def _weight(self) -> int:
        """Samples in the micro-batch; hooks of a weight update, which see none, weigh all alike."""
        if self.hook is not None:
            return self.drawn
        if self._size is None:
            self._size = samples_in(self._batch, self.drawn)
        return self._size

    @property
    def wants_steps(self) -> bool:
        """Whether a noted value is to be logged for its step (`on_step`), not for the epoch alone."""
        return any(options.get("on_step") for _, _, _, options, *_ in self._logged)

    def replay(self, step_hook: str) -> list[dict[str, float]]:
        """Pass what was logged since the last replay to Lightning.

        Args:
            step_hook: the step under whose name Lightning files calls that came from no other hook.

        Returns:
            For each weight update since then, its own means of what is logged per step, under the names Lightning gives them.
        """
        if self.module.trainer.barebones:
            self._logged.clear()
        logged = self._logged
        if self._gather is not None:  # the others', too: in a pipeline the first process has no loss of its own
            logged = self._gathered()
            self.latest.update({name: value.step if isinstance(value, _Forwarded) else value for _, name, value, *_ in logged})
        calls: dict[tuple[str, str], list[_Call]] = {}
        for hook, name, value, options, *rest in logged:
            key = hook or step_hook, name
            known = self._options.setdefault(key, options)
            if known != options and _written_out(key[0], known) != _written_out(key[0], options):
                raise PlanError(f"self.log({name!r}, ...) was called in {key[0]} with different options; one name needs one set of options")
            calls.setdefault(key, []).append((value, *rest))
        self._logged.clear()

        updates = 1 + max((update for values in calls.values() for _, _, update, _ in values), default=-1)
        rows: list[dict[str, float]] = [{} for _ in range(updates)]
        fx_before = self.module._current_fx_name
        try:
            for (hook, name), values in calls.items():
                self.module._current_fx_name = hook
                self._pass_on(hook, name, values, rows)
        finally:
            self.module._current_fx_name = fx_before
        return rows

    def _gathered(self) -> list[_Logged]:
        """What all processes have logged, in the order in which a single process would have."""
        logs_metrics = any(isinstance(call[2], _Forwarded) for call in self._logged)
        paths = {id(child): path for path, child in self.module.named_modules()} if logs_metrics else {}
        portable = []
        for hook, name, value, options, weight, update, number in self._logged:
            if isinstance(value, _Forwarded):
                value = paths[id(value.metric)], None if value.step is None else value.step.cpu()
            else:
                (value,) = _floats(name, [value])
            portable.append((hook, name, value, options, weight, update, number))
        everyone = self._gather(portable)
        # The processes of the first replica; a loss is on its last stage only.
        of_hooks = [
            [call[:3] for call in calls if call[0] not in (None, "on_before_backward")] for calls in everyone[: self._last_stage_rank + 1]
        ]
        for pair in (pair for calls in of_hooks for pair in zip_longest(calls, of_hooks[-1])):
            if repr(pair[0]) != repr(pair[1]):  # NaN equals NaN
                hook, name, _ = pair[0] or pair[1]
                raise PlanError(
                    f"self.log({name!r}, ...) in {hook} is not the same in all processes of a pipeline: each has the gradients of its own stages"
                )
        logged = [call for process, calls in enumerate(everyone) for call in calls if process == self._last_stage_rank or call[0] is None]
        logged.sort(key=lambda call: (call[5], call[6]))
        return [
            (hook, name, _Forwarded(self.module.get_submodule(value[0]), value[1]) if isinstance(value, tuple) else value, *rest)
            for hook, name, value, *rest in logged
        ]

    def _pass_on(self, hook: str, name: str, calls: list[_Call], rows: list[dict[str, float]]) -> None:
        options = self._options[hook, name]
        if isinstance(calls[-1][0], _Forwarded):
            self._metrics[hook, name] = calls[-1][0].metric
            LightningModule.log(self.module, name, calls[-1][0].metric, **options)
            result = self._result_of(hook, name, options)
            meta, result._forward_cache = result.meta, calls[-1][0].step  # the metric's own is of the last step in this process
            for value, _, update, _ in calls:
                if meta.on_step and meta.logger and value.step is not None:
                    rows[update][meta.forked_name(on_step=True)] = float(value.step)
            return
        values = _floats(name, [value for value, *_ in calls])
        per_update: defaultdict[int, _Average] = defaultdict(_Average)
        total = self._sums.setdefault((hook, name), _Average())
        places = [place for _, _, *place in calls]
        for value, (_, weight, update, _), place, following in zip(values, calls, places, [*places[1:], None], strict=True):
            total.add(value, weight)
            if place != following:  # of several calls in one step its value is the last, as Lightning has it
                per_update[update].add(value, weight)

        kind = _kind(options.get("reduce_fx", "mean"))
        steps = {update: average.reduced(kind) for update, average in per_update.items()}
        last = torch.tensor(steps[calls[-1][2]], dtype=torch.float64)
        result = self._put(hook, name, options, last, kind)
        if result.meta.on_step and result.meta.logger:
            column = result.meta.forked_name(on_step=True)
            for update, step in steps.items():
                rows[update][column] = step

    def _put(self, hook: str, name: str, options: dict[str, Any], last: torch.Tensor, kind: str) -> Any:
        """Make the last value of a name and its sums over the epoch known to Lightning; returns where Lightning keeps them."""
        total = self._sums[hook, name]
        result = self._results.get((hook, name))
        if result is None:
            LightningModule.log(self.module, name, last, batch_size=1, **options)
            result = self._results[hook, name] = self._result_of(hook, name, options)
        else:  # known to Lightning in this epoch, its options checked: only the value is new
            result.update(last, 1)
        if result.meta.on_epoch:
            # Lightning would weigh the host step as one batch, in float32: put the sums over the epoch's micro-batches in its place.
            if result.meta.is_mean_reduction:
                result.value = torch.tensor(total.weighted, dtype=torch.float64)
                result.cumulated_batch_size = torch.tensor(total.weight, dtype=torch.float64)
            else:
                result.value = torch.tensor(total.reduced(kind), dtype=torch.float64)
        return result

    def _result_of(self, hook: str, name: str, options: dict[str, Any]) -> Any:
        """Where Lightning keeps what was logged under a name."""
        results = self.module.trainer._results
        suffix = f".{results.dataloader_idx}" if options.get("add_dataloader_idx", True) and results.dataloader_idx is not None else ""
        return results[f"{hook}.{name}{suffix}"]


def _written_out(hook: str, options: dict[str, Any]) -> dict[str, Any]:
    """All options of a `self.log` in a hook, those included that were left to Lightning."""
    whole = {**_OPTIONS, **options}
    levels = _FxValidator.check_logging_and_get_default_levels(hook, on_step=whole["on_step"], on_epoch=whole["on_epoch"])
    whole |= {"levels": levels, "on_step": None, "on_epoch": None, "reduce_fx": _kind(whole["reduce_fx"])}
    return whole | {"logger": whole["logger"] is not False}


def _kind(reduce_fx: Any) -> str:
    """How Lightning's `reduce_fx` reduces: sum, min, max or mean."""
    kind = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
    return kind if kind in ("sum", "min", "max") else "mean"


def _floats(name: str, values: list[Any]) -> list[float]:
    """Numbers and one-element tensors as floats, with one synchronisation for all that lie on an accelerator."""
    numbers = []
    on_device = []
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise UserError(f"self.log({name!r}, ...) was given a tensor of {value.numel()} elements; it must be a single number")
            if value.is_cpu:
                value = value.item()
            else:
                on_device.append((place, value.reshape(()).double()))
        elif not isinstance(value, Number):
            raise UserError(f"self.log({name!r}, ...) was given a {type(value).__name__}; it must be a single number")
        numbers.append(value)
    if on_device:
        for (place, _), number in zip(on_device, torch.stack([value for _, value in on_device]).tolist(), strict=True):
            numbers[place] = number
    return [float(number) for number in numbers]


def differing_names(everyone: list[dict[str, float]]) -> list[str]:
    """Names under which processes hold different values, without their forks `_step` and `_epoch`.

    NaN equals NaN; processes that have not logged a name do not count for it.
    """
    seen: defaultdict[str, set[float | None]] = defaultdict(set)
    for values in everyone:
        for name, value in values.items():
            seen[name].add(value if value == value else None)
    apart = [name for name, values in seen.items() if len(values) > 1]
    forks = {name + fork for name in apart for fork in ("_step", "_epoch")}
    return [name for name in apart if name not in forks]


def without_logs(recorder: LogRecorder, block: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts for running a block again: what it logs is dropped, and its metrics stay as they were."""
    metrics = metrics_of(block)

    @contextmanager
    def muted() -> Iterator[None]:
        before, recorder.muted = recorder.muted, True
        try:
            with unchanged_metrics(metrics):
                yield
        finally:
            recorder.muted = before

    return muted


@contextmanager
def undone_unless_finished(recorder: LogRecorder, metrics: list[Metric]) -> Iterator[None]:
    """Take back what a step has logged and added to metrics if it is left half-way, at a call of `self(...)` that other processes carry out."""
    put_back, logged = set_aside(metrics), len(recorder._logged)
    try:
        yield
    except BaseException:
        put_back()
        del recorder._logged[logged:]
        raise
