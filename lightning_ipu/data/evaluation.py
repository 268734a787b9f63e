"""A user's loader in validation, test and prediction: every sample exactly once, under seeds of its own, divided among processes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from lightning_fabric.utilities.data import sized_len
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_ipu.data.order import EVALUATE, EvaluationBatchSampler
from lightning_ipu.data.samples import LOADER, InPlaceOfLoader, SeededDataset, rebuilt, refuse_shared_out
from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import mix, preserved_streams, seed_all


class EvaluationData(InPlaceOfLoader):
    """A user's loader in validation, test and prediction: every sample once, in its own order, under seeds of its own.

    Args:
        loader: the user's.
        seed: of what its samples draw.
        limit: batches of the user's loader, or share of them, that are evaluated in all.
        index, count: this process evaluates every `count`-th batch from number `index` on.

    `size` is the number of samples in the batch last drawn, None where that is not known.

    Raises:
        PlanError: a loader whose batches cannot be shared out over processes.
    """

    def __init__(self, loader: DataLoader, *, seed: int, limit: int | float = 1.0, index: int = 0, count: int = 1) -> None:
        refuse_shared_out(loader, "an evaluation's loader")
        self.user_loader, self.seed, self.size = loader, seed, None
        self._sizes: deque[int] | None = None
        self.loader, self._guarded = loader, True
        if (
            type(loader).__iter__ is DataLoader.__iter__
            and not isinstance(loader.dataset, IterableDataset)
            and loader.batch_sampler is not None
        ):
            batches = loader.batch_sampler
            if type(batches) is BatchSampler and batches.drop_last:
                batches = BatchSampler(loader.sampler, batches.batch_size, drop_last=False)
            length = sized_len(batches)
            if length is None and count > 1:
                raise PlanError(f"the sampler {type(loader.sampler).__name__} has no length; {count} processes need one to share it out")
            self.total = None if length is None else min(length, limit) if isinstance(limit, int) else int(length * limit)
            if self.total == 0 and length and limit:
                raise PlanError(f"a share of {limit} of the {length} batches of an evaluation is less than one batch; raise the limit")
            sized = EvaluationBatchSampler(batches, seed=seed, total=self.total, index=index, count=count)
            dataset = SeededDataset(loader.dataset, seed=seed, collate_fn=loader.collate_fn)
            self._sizes, self._guarded = sized.sizes, not dataset.draws_nothing or type(batches) is not BatchSampler
            self.loader = rebuilt(loader, seed=seed, dataset=dataset, batch_sampler=sized)
        elif count > 1:
            raise PlanError(
                f"a {type(loader.dataset).__name__} or a loader without batch_sampler is evaluated by one process only, not {count}"
            )
        elif type(loader).__iter__ is DataLoader.__iter__ and loader.num_workers:  # unchanged, but with workers that ignore signals
            order = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
            batches = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            self.loader = rebuilt(loader, seed=seed, dataset=loader.dataset, **order, **batches)

    @property
    def left_out(self) -> int:
        """Samples that the user's own loader would have left out of the evaluation."""
        if self._sizes is None or type(self.user_loader.batch_sampler) is not BatchSampler or not self.user_loader.drop_last:
            return 0
        return len(self.user_loader.sampler) % self.user_loader.batch_size

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        with preserved_streams() if self._guarded else nullcontext():
            if self._guarded and self._is_seeded:
                self.loader.generator.manual_seed(mix(self.seed, LOADER))  # the same every time: workers get their seeds from it
            elif self._guarded:
                seed_all(mix(self.seed, EVALUATE))
            batches = iter(self.loader)
        for number in itertools.count():
            try:
                batch = self._next(batches, number)
            except StopIteration:
                return
            self.size = self._sizes.popleft() if self._sizes is not None else None
            yield batch

    @property
    def _is_seeded(self) -> bool:
        """Whether each sample is fetched under a seed of its own."""
        return self.loader is not self.user_loader

    def _next(self, batches: Iterator[Any], number: int) -> Any:
        """The next batch; in a loader without such seeds, its draws are a function of the batch's number."""
        if not self._guarded or self.loader.num_workers:
            return next(batches)
        with preserved_streams():
            if not self._is_seeded:
                seed_all(mix(self.seed, EVALUATE, number))
            return next(batches)
