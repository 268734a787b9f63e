"""The training loader as Lightning's loop sees it: one handle for each host step, which draws its micro-batches one at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from lightning_ipu.data.training import TrainingData
from lightning_ipu.plan import Plan, PlanError
from lightning_ipu.randomness import preserved_streams


class HostStep:
    """The micro-batches of some weight updates, taken one at a time.

    Args:
        draw: makes one ready for the device, given its number within the host step.
        weight_updates: how many updates they are for.
    """

    def __init__(self, draw: Callable[[int], Any], weight_updates: int) -> None:
        self._draw, self.weight_updates = draw, weight_updates
        self.drawn, self.done = 0, 0  # micro-batches, weight updates
        self._first: list[Any] = []

    def first(self) -> Any:
        """The first micro-batch, before it is taken."""
        self._first = [self.take()]
        return self._first[0]

    def take(self) -> Any:
        """The next micro-batch, on the device."""
        if self._first:
            return self._first.pop()
        self.drawn += 1
        return self._draw(self.drawn - 1)


def _undisturbed(loader: DataLoader) -> Iterator[Any]:
    """A loader's batches, with the random streams left alone."""
    with preserved_streams():
        batches = iter(loader)
    while True:
        with preserved_streams():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


class HostSteps:
    """The training loader as Lightning's loop sees it: as long as the epoch has micro-batches, one `HostStep` for each host step.

    Whoever else iterates over it (a callback that shows some of `trainer.train_dataloader`) gets the batches of the user's own loader.

    Args:
        data: where the micro-batches come from.
        plan: decides how many of them make a weight update.
        micro_batches: how many are trained on in an epoch, a multiple of A x R; None for a stream of unknown length.
        is_loops: whether it is Lightning's loop that holds an iterator.
        begin: called at an epoch's first step; returns (epoch, number of the first micro-batch), or None if that is not known yet.
        next_updates: called at each host step; returns how many weight updates it may hold.
        ready: makes a host micro-batch ready for the device, given its number within the host step.
        left_over: called at an epoch's end with the leftover samples of a stream of unknown length and the number of its updates.
    """

    def __init__(
        self,
        data: TrainingData,
        *,
        plan: Plan,
        micro_batches: int | None,
        is_loops: Callable[[Iterator[Any]], bool],
        begin: Callable[[], tuple[int, int] | None],
        next_updates: Callable[[], int],
        ready: Callable[[Any, int], Any],
        left_over: Callable[[int, int], None],
    ) -> None:
        self.data, self.plan, self.micro_batches = data, plan, micro_batches
        self._is_loops, self._begin, self._next_updates = is_loops, begin, next_updates
        self._ready, self._left_over = ready, left_over

    def __len__(self) -> int:
        if self.micro_batches is None:
            raise TypeError("a stream without a length")
        return self.micro_batches

    def __iter__(self) -> Iterator[Any]:
        def steps() -> Iterator[Any]:
            nonlocal iterator
            looping, iterator = self._is_loops(iterator), None
            yield from self._host_steps() if looping else _undisturbed(self.data.user_loader)

        iterator = steps()
        return iterator

    def _host_steps(self) -> Iterator[HostStep]:
        if (begins := self._begin()) is None:
            return
        epoch, first = begins
        stream = self.data.epoch(epoch, first=first, last=self.micro_batches)
        if self.micro_batches is None:
            yield from self._of_stream(stream, first)
            return

        def fetch() -> Any:
            try:
                return next(stream)
            except StopIteration:
                asked_for = "its length promised" if self.data.samples is not None else "limit_train_batches asks for"
                raise PlanError(
                    f"the training data of epoch {epoch} ended before the {self.micro_batches} micro-batches that {asked_for}"
                ) from None

        try:
            while first < self.micro_batches:
                yield (host_step := HostStep(lambda number: self._ready(fetch(), number), self._next_updates()))
                first += host_step.done * self.plan.micro_batches_per_update  # fewer than it may hold where it was ended early
                for _ in range(host_step.done * len(self.data.shard.places) - host_step.drawn):
                    fetch()  # a middle stage has fetched only the first
        finally:
            stream = None  # ends the loader's workers, whoever still holds a handle

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is in Lightning's counters. That there is one says that this loader resumes where it stood."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""

    @property
    def _iterator(self) -> Any:
        """Through this attribute of a DataLoader Lightning ends persistent workers when a fit ends."""
        return self.data.loader._iterator

    @_iterator.setter
    def _iterator(self, value: None) -> None:
        self.data.loader._iterator = value

    def _of_stream(self, stream: Iterator[Any], first: int) -> Iterator[HostStep]:
        """Host steps of one weight update: only what is held in memory is known to be a whole update."""
        per_update = self.plan.micro_batches_per_update
        while len(held := deque(islice(stream, per_update))) == per_update:
            yield HostStep(lambda number, held=held: self._ready(held.popleft(), number), 1)
            first += per_update
        self._left_over(len(held) * self.plan.micro_batch_size + self.data.short_samples, first // per_update)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "data":
            raise AttributeError(name)
        return getattr(self.data.user_loader, name)
