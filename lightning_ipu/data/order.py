"""Which sample comes next: the order of an epoch, its micro-batches and a process's share of them.

The order is the user's own sampler's, run under (seed, epoch), so that neither loader workers nor replicas nor an interruption can change it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import mix, name_word, preserved_streams, seed_all

_ORDER, EVALUATE = name_word("order"), name_word("evaluate")

WITHOUT_A_PAST = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def epoch_order(sampler: Sampler, *, seed: int, epoch: int) -> list[Any]:
    """The sampler's order in one epoch, a function of (seed, epoch); the caller's random streams stay as they were."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return ordered(sampler, mix(seed, _ORDER, epoch))


def ordered(sampler: Sampler, word: int) -> list[Any]:
    """The sampler's order under a seed, random streams left as they were."""
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(word)
    with preserved_streams():
        seed_all(word)
        return list(sampler)


def state_of(source: Any) -> Any:
    """A copy of a sampler's or data set's state, None where it has no `state_dict`."""
    return deepcopy(source.state_dict()) if hasattr(source, "state_dict") and hasattr(source, "load_state_dict") else None


@dataclass(frozen=True, kw_only=True)
class Share:
    """The micro-batches of every weight update that a process needs: those in `places` of each `per_update`."""

    places: range
    per_update: int

    def __contains__(self, number: int) -> bool:
        return number % self.per_update in self.places


class MicroBatchSampler:
    """Batch sampler of an epoch's micro-batches from number `first` to number `last`, each with the epoch it belongs to."""

    def __init__(self, sampler: Sampler, *, seed: int, micro_batch_size: int, share: Share) -> None:
        self.sampler, self.seed, self.micro_batch_size, self.share = sampler, seed, micro_batch_size, share
        self.epoch, self.first, self.last = 0, 0, 0
        self.began: tuple[int, Any] | None = None  # an epoch, and the sampler's state at its beginning

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        size, epoch = self.micro_batch_size, self.epoch
        self.began = epoch, state_of(self.sampler)
        order = epoch_order(self.sampler, seed=self.seed, epoch=epoch)
        if len(order) < self.last * size:
            raise PlanError(f"{type(self.sampler).__name__} gave {len(order)} samples in epoch {epoch}, fewer than its length promised")
        for number in range(self.first, self.last):
            if number in self.share:
                yield epoch, order[number * size : (number + 1) * size]


class EvaluationBatchSampler:
    """The user's batch sampler in evaluation: every `count`-th batch from number `index` on, as many in every process.

    How many samples each batch holds is noted, since averages are weighted by that; a batch that only fills up the last round has 0.
    """

    def __init__(self, batches: BatchSampler, *, seed: int, total: int | None, index: int, count: int) -> None:
        self.batches, self.seed, self.total, self.index, self.count = batches, seed, total, index, count
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[tuple[None, list[Any]]]:
        self.sizes.clear()
        batches = self.batches
        if type(batches) is BatchSampler:  # a shuffled order draws: the same each time
            batches = BatchSampler(ordered(batches.sampler, mix(self.seed, EVALUATE)), batches.batch_size, batches.drop_last)
        batches = islice(batches, self.total)
        while a_round := list(islice(batches, self.count)):
            is_scored = self.index < len(a_round)
            indices = list(a_round[self.index]) if is_scored else list(a_round[0])[:1]
            self.sizes.append(len(indices) if is_scored else 0)
            yield None, indices

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("a sampler without a length")
        return -(-self.total // self.count)
