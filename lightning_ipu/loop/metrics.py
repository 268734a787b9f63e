"""Metrics of torchmetrics: their states set aside, saved, and merged over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import LightningModule
from torch import nn
from torchmetrics import Metric

Gather = Callable[[Any], list[Any]]
MetricStates = dict[str, tuple[int, dict[str, Any]]]


class SharedMetrics:
    """Metrics of torchmetrics that several processes update: every process gets the states of all before anyone computes.

    torchmetrics' own synchronisation needs every process to have seen something, which the stages before the last and the processes
    without a batch have not.
    """

    def __init__(self, module: LightningModule, gather: Gather) -> None:
        self._module, self._gather = module, gather
        # Of each metric that was merged: its number of updates in all processes, and what was this process's own.
        self._own: dict[str, tuple[int, tuple[int, dict[str, Any]]]] = {}
        self._by_path()

    def _by_path(self) -> dict[str, Metric]:
        """The metrics there are by now (a MetricTracker makes new ones), with their own synchronisation over processes switched off."""
        metrics = {path: child for path, child in self._module.named_modules() if isinstance(child, Metric)}
        for metric in metrics.values():
            metric.distributed_available_fn = _alone
        return metrics

    def begin(self) -> None:
        """Called before steps: every process goes on from its own states, where what was shared has not been reset."""
        metrics = self._by_path()
        for path, (count, own) in self._own.items():
            if path in metrics and metrics[path]._update_count == count:
                load_metric_states(self._module, {path: own})
        self._own = {}

    def share(self) -> None:
        """Called before anyone computes: merge the states of all processes, process by process; once, until steps begin again."""
        if not self._own:
            own, merged = metric_states(self._module), self.merged()
            load_metric_states(self._module, merged)
            for path, (count, whole) in merged.items():
                defaults = self._module.get_submodule(path)._defaults
                self._own[path] = count, own.get(path) or (0, deepcopy({name: defaults[name] for name in whole}))

    def merged(self) -> MetricStates:
        """The states that all processes have updated, in the order of processes, as one."""
        metrics, states = self._by_path(), metric_states(self._module)
        if not metrics:
            return {}
        for path, (count, own) in self._own.items():
            if path in states and states[path][0] == count:
                states[path] = own
        everyone = self._gather(states)
        merged: MetricStates = {}
        for path, metric in metrics.items():
            theirs = [states[path] for states in everyone if path in states and states[path][0]]
            if not theirs:
                continue
            whole: dict[str, Any] = {}
            for name in theirs[0][1]:
                values, reduction = [state[name] for _, state in theirs], metric._reductions[name]
                if isinstance(metric._defaults[name], list):
                    whole[name] = [item for value in values for item in (value if isinstance(value, list) else [value])]
                else:
                    whole[name] = reduction(torch.stack(values)) if reduction is not None else torch.stack(values)
            merged[path] = sum(count for count, _ in theirs), whole
        return merged


def metric_states(module: LightningModule) -> MetricStates:
    """The metrics of a module that have been updated since their last reset: how often, and their states, on the host.

    A wrapper that shows the states of the metric inside it (ClasswiseWrapper) has none of its own.
    """
    states = {}
    for path, metric in module.named_modules():
        if isinstance(metric, Metric) and metric._update_count:
            own = {name: value for name, value in metric.metric_state.items() if name in vars(metric)}
            states[path] = metric._update_count, apply_to_collection(own, torch.Tensor, lambda state: state.detach().cpu().clone())
    return states


def load_metric_states(module: LightningModule, states: MetricStates) -> None:
    """Put such states in the place of what the metrics hold."""
    for path, (count, state) in states.items():
        metric = module.get_submodule(path)
        for name, value in state.items():
            setattr(metric, name, apply_to_collection(value, torch.Tensor, torch.Tensor.to, metric.device))
        metric._update_count, metric._computed = count, None


def metrics_of(module: nn.Module) -> list[Metric]:
    """The metrics of torchmetrics in a module."""
    return [child for child in module.modules() if isinstance(child, Metric)]


@contextmanager
def unchanged_metrics(metrics: list[Metric]) -> Iterator[None]:
    """Leave metrics as they were, whatever is done to them inside."""
    put_back = set_aside(metrics)
    try:
        yield
    finally:
        put_back()


def set_aside(metrics: list[Metric]) -> Callable[[], None]:
    """Give metrics copies of their states to work on; returns what puts the states back."""
    before = [(metric, metric.metric_state, metric._update_count, metric._computed, metric._forward_cache) for metric in metrics]
    for metric, state, *_ in before:
        for name, value in state.items():
            setattr(metric, name, apply_to_collection(value, torch.Tensor, lambda tensor: tensor.detach().clone()))

    def put_back() -> None:
        for metric, state, *others in before:
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed, metric._forward_cache = others

    return put_back


def _alone() -> bool:
    """The answer to torchmetrics when it asks whether there are other processes."""
    return False
