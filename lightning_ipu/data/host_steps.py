"""The micro-batches of an epoch in host steps, and the training loader as Lightning sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from lightning_ipu.data.samples import InPlaceOfLoader
from lightning_ipu.data.training import TrainingData
from lightning_ipu.plan import Plan, PlanError
from lightning_ipu.randomness import preserved_streams


class HostStep:
    """The micro-batches of some weight updates, taken one at a time.

    Args:
        draw: makes one ready for the device, given its number within the host step.
        weight_updates: how many updates they are for.
        goes_on: called with the number of updates done; whether the epoch has data for another one. None if that is known in advance.
    """

    def __init__(self, draw: Callable[[int], Any], weight_updates: int, goes_on: Callable[[int], bool] | None = None) -> None:
        self._draw, self.weight_updates, self._goes_on = draw, weight_updates, goes_on
        self.drawn, self.done = 0, 0  # micro-batches, weight updates
        self.ends_epoch = False  # whether the epoch's data are over, before the end that was announced
        self._first: list[Any] = []

    def first(self) -> Any:
        """The first micro-batch, which `take` will still return."""
        self._first = [self.take()]
        return self._first[0]

    def take(self) -> Any:
        """The next micro-batch, on the device."""
        if self._first:
            return self._first.pop()
        self.drawn += 1
        return self._draw(self.drawn - 1)

    def end_update(self) -> None:
        """Called after each weight update."""
        self.done += 1
        self.ends_epoch = self._goes_on is not None and not self._goes_on(self.done)


class _Ahead:
    """A stream that is read ahead by a weight update: only then is it known whether it has that many micro-batches."""

    def __init__(self, stream: Iterator[Any], per_update: int) -> None:
        self._stream, self._per_update, self._held = stream, per_update, deque()

    @property
    def held(self) -> int:
        return len(self._held)

    def has_update(self) -> bool:
        self._held.extend(islice(self._stream, self._per_update - self.held))
        return self.held == self._per_update

    def __next__(self) -> Any:
        return self._held.popleft() if self._held else next(self._stream)


def host_steps(
    data: TrainingData,
    *,
    plan: Plan,
    epoch: int,
    first: int,
    last: int | None,
    next_updates: Callable[[], int],
    ready: Callable[[Any, int], Any],
    left_over: Callable[[int, int], None],
) -> Iterator[HostStep]:
    """The host steps of an epoch from micro-batch number `first` on.

    Args:
        data: where the micro-batches come from.
        plan: decides how many of them make a weight update.
        epoch: its number.
        first, last: micro-batches in it, a multiple of A x R; None as the last one for a stream of unknown length.
        next_updates: called at each host step; returns how many weight updates it may hold.
        ready: makes a host micro-batch ready for the device, given its number within the host step.
        left_over: called at the end of a stream of unknown length with its leftover samples and the number of its updates.

    Raises:
        PlanError: the data end before they should.
    """
    stream, per_update = data.epoch(epoch, first=first, last=last), plan.micro_batches_per_update
    end = float("inf") if last is None else last
    ahead = _Ahead(stream, per_update) if data.samples is None else None

    def fetch() -> Any:
        try:
            return next(stream if ahead is None else ahead)
        except StopIteration:
            raise PlanError(f"the training data of epoch {epoch} ended before the {last} micro-batches that its length promised") from None

    def goes_on(updates: int) -> bool:
        done = first + updates * per_update
        if done >= end or ahead.has_update():
            return True
        left_over(ahead.held * plan.micro_batch_size + data.short_samples, done // per_update)
        return False

    if last is not None and ahead is not None and 0 < first < last and not ahead.has_update():
        raise PlanError(f"the training data of epoch {epoch} ended before micro-batch {first}, with which the run was to go on")
    try:
        while first < end and (ahead is None or goes_on(0)):
            # Without a length only what is held in memory is known to be a whole update.
            updates = 1 if last is None else next_updates()
            yield (host_step := HostStep(lambda number: ready(fetch(), number), updates, ahead and goes_on))
            first += host_step.done * per_update  # fewer than it may hold where it was ended early
            for _ in range(host_step.done * len(data.share.places) - host_step.drawn):
                fetch()  # a middle stage has fetched only the first
    finally:
        stream = ahead = None  # ends the loader's workers, whoever still holds a host step


class TrainingLoader(InPlaceOfLoader):
    """The training loader as Lightning sees it: as long as the epoch has micro-batches.

    Lightning's own loop draws nothing from it. Whoever else iterates over it (a callback that shows some of `trainer.train_dataloader`)
    gets the batches of the user's own loader.

    Args:
        data: where the micro-batches come from.
        micro_batches: how many are trained on in an epoch; None for a stream of unknown length.
        is_loops: whether it is Lightning's loop that holds an iterator.
    """

    def __init__(self, data: TrainingData, *, micro_batches: int | None, is_loops: Callable[[Iterator[Any]], bool]) -> None:
        self.data, self.loader, self.user_loader = data, data.loader, data.user_loader
        self.micro_batches, self._is_loops = micro_batches, is_loops

    def __len__(self) -> int:
        if self.micro_batches is None:
            raise TypeError("a stream without a length")
        return self.micro_batches

    def __iter__(self) -> Iterator[Any]:
        def batches() -> Iterator[Any]:
            nonlocal iterator
            looping, iterator = self._is_loops(iterator), None
            if not looping:
                yield from _with_streams_kept(self.user_loader)

        iterator = batches()
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Empty, since Lightning's counters hold the position; because there is one, Lightning knows that this loader can resume."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""


def _with_streams_kept(loader: DataLoader) -> Iterator[Any]:
    """A loader's batches; what it draws leaves the global random streams as they were."""
    with preserved_streams():
        batches = iter(loader)
    while True:
        with preserved_streams():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch
