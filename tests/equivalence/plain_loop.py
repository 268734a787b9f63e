"""A training loop in plain PyTorch, to hold the strategy against; it shares no code with it.

Replicas are copies of the network that run side by side; gradients are averaged over replicas and micro-batches by arithmetic
written out here, BatchNorm's statistics are averaged over replicas after every weight update.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Course:
    """What a training run went through."""

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def train(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    micro_batches: Sequence[Any],
    *,
    replicas: int,
    accumulation: int,
    schedule: Any = None,
) -> Course:
    """Train on micro-batches in their order; replica r takes numbers r x A to r x A + A - 1 of every weight update."""
    course, per_update = Course(), replicas * accumulation
    for start in range(0, len(micro_batches), per_update):
        copies = [copy.deepcopy(network) for _ in range(replicas)]
        for number, micro_batch in enumerate(micro_batches[start : start + per_update]):
            loss = loss_of(copies[number // accumulation], micro_batch)
            loss.backward()
            course.losses.append(loss.item())

        for name, parameter in network.named_parameters():
            parameter.grad = sum(dict(one.named_parameters())[name].grad for one in copies) / per_update
        for name, buffer in network.named_buffers():
            theirs = [dict(one.named_buffers())[name] for one in copies]
            buffer.copy_(sum(theirs) / replicas if buffer.is_floating_point() else theirs[0])

        course.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return course


@torch.no_grad()
def mean_loss(network: nn.Module, loss_of: Callable[[nn.Module, Any], torch.Tensor], samples: Sequence[Any]) -> float:
    """The loss of a network in evaluation, averaged over samples that go through it one by one."""
    network.eval()
    total = sum(loss_of(network, sample).double().item() for sample in samples)
    network.train()
    return total / len(samples)
