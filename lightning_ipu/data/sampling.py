"""Order, shards and position: the only place that decides which sample comes next.

Lightning's loops receive loaders made here. The training loader hands out one `HostStep` per host step, from which the engine draws
micro-batches one at a time; memory does not grow with the plan. The order is the user's own sampler's, run under (seed, epoch); a
sample's own randomness is seeded with (seed, epoch, index), so neither loader workers nor replicas nor an interruption can change it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from lightning_fabric.utilities.data import sized_len
from torch.utils._pytree import tree_flatten
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_ipu.data.workers import Loader
from lightning_ipu.plan import Plan, PlanError
from lightning_ipu.randomness import mix, name_word, preserved_streams, seed_all

_ORDER, _SAMPLE, _EVALUATE, _LOADER, _STREAM = (name_word(name) for name in ("order", "sample", "evaluate", "loader", "stream"))


_WITHOUT_A_PAST = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def epoch_order(sampler: Sampler, *, seed: int, epoch: int) -> list[Any]:
    """The sampler's order in one epoch, a function of (seed, epoch); the caller's random streams stay as they were."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return _order(sampler, mix(seed, _ORDER, epoch))


def _order(sampler: Sampler, word: int) -> list[Any]:
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
class Shard:
    """The micro-batches of every weight update that a process needs: those in `places` of each `per_update`."""

    places: range
    per_update: int

    def __contains__(self, number: int) -> bool:
        return number % self.per_update in self.places


class MicroBatchSampler:
    """Batch sampler of an epoch's micro-batches from number `first` to number `last`, each with the epoch it belongs to."""

    def __init__(self, sampler: Sampler, *, seed: int, micro_batch_size: int, shard: Shard) -> None:
        self.sampler, self.seed, self.micro_batch_size, self.shard = sampler, seed, micro_batch_size, shard
        self.epoch, self.first, self.last = 0, 0, 0
        self.began: tuple[int, Any] | None = None  # an epoch, and the sampler's state at its beginning

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        size, epoch = self.micro_batch_size, self.epoch
        self.began = epoch, state_of(self.sampler)
        order = epoch_order(self.sampler, seed=self.seed, epoch=epoch)
        if len(order) < self.last * size:
            raise PlanError(f"{type(self.sampler).__name__} gave {len(order)} samples in epoch {epoch}, fewer than its length promised")
        for number in range(self.first, self.last):
            if number in self.shard:
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
            batches = BatchSampler(_order(batches.sampler, mix(self.seed, _EVALUATE)), batches.batch_size, batches.drop_last)
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


def _tensors_of(dataset: Dataset) -> tuple[TensorDataset, list[Sequence[int]]] | None:
    """The TensorDataset that a data set is or is a subset of, and the subsets' indices from the outside in; None for any other."""
    levels = []
    while type(dataset) is Subset:
        levels.append(dataset.indices)
        dataset = dataset.dataset
    return (dataset, levels) if type(dataset) is TensorDataset else None


class _Counted:
    """A collate_fn whose micro-batches come with their number of samples."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        return len(samples), self._collate_fn(samples)


class SeededDataset(Dataset):
    """A map-style data set whose samples' randomness (torch, numpy, Python) is a function of (seed, epoch, index).

    A user's `collate_fn` goes on in the stream of the micro-batch's last sample. A data set with a method
    `seeded_batch(indices, *, seed, epoch)` draws whole collated micro-batches by that law itself. The micro-batches of a TensorDataset,
    which draws nothing, are indexed whole: the default collation's numbers without a tensor for each sample.
    """

    def __init__(self, dataset: Dataset, *, seed: int, collate_fn: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset, self.seed = dataset, seed
        self._draws_batches = hasattr(dataset, "seeded_batch")
        self._tensors = _tensors_of(dataset) if collate_fn is default_collate else None
        self.draws_nothing = self._tensors is not None
        self.collate_fn = _as_is if self._draws_batches or self.draws_nothing else collate_fn

    def __getitems__(self, batch: tuple[int | None, list[Any]]) -> Any:
        epoch, indices = batch
        if self._draws_batches:
            return self.dataset.seeded_batch(indices, seed=self.seed, epoch=epoch or 0)
        if self._tensors is not None:
            return self._indexed(indices)
        stream = mix(self.seed, _EVALUATE) if epoch is None else mix(self.seed, _SAMPLE, epoch)
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = []
        for index in indices:
            seed_all(mix(stream, index if isinstance(index, int) else name_word(repr(index))))
            samples += fetch([index]) if fetch is not None else [self.dataset[index]]
        return samples

    def _indexed(self, indices: list[Any]) -> list[torch.Tensor]:
        dataset, levels = self._tensors
        for level in levels:
            indices = [level[index] for index in indices]
        if all(type(index) is int and index >= 0 for index in indices):
            rows = torch.tensor(indices)
            return [tensor.index_select(0, rows.to(tensor.device)) for tensor in dataset.tensors]
        return default_collate([dataset[index] for index in indices])

    def __len__(self) -> int:
        return len(self.dataset)


def _as_is(batch: Any) -> Any:
    return batch


def _show_data(worker_init_fn: Callable[[int], Any] | None, worker: int) -> None:
    """In a worker: let torch's get_worker_info return the user's own data set."""
    info = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # the object is read-only
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _rebuilt(loader: DataLoader, *, seed: int, **changed: Any) -> Loader:
    """The same loader over another data set or sampler; its own draws (worker seeds) come from a generator of its own."""
    options = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "persistent_workers")
    }
    if loader.num_workers:
        options["multiprocessing_context"] = loader.multiprocessing_context
    if isinstance(changed["dataset"], SeededDataset):
        options["collate_fn"] = changed["dataset"].collate_fn
        options["worker_init_fn"] = partial(_show_data, loader.worker_init_fn)
    generator = torch.Generator().manual_seed(mix(seed, _LOADER))
    return Loader(**{**options, **changed, "generator": generator})


def _refuse_shared_out(loader: DataLoader, name: str) -> None:
    if isinstance(loader.sampler, DistributedSampler):
        raise PlanError(
            f"{name} has a {type(loader.sampler).__name__}; IPUStrategy shares the samples out itself and would take a share of its share: give"
            " the loader the whole data set, with shuffle=True or a sampler of your own"
        )


class TrainingData:
    """A user's training loader under the laws of this package.

    Args:
        loader: a torch DataLoader; its batch size is the micro-batch.
        seed: of the order and of the samples' randomness.
        shard: the micro-batches that this process needs.

    Raises:
        PlanError: a loader whose order or batches the strategy cannot own.
    """

    def __init__(self, loader: DataLoader, *, seed: int, shard: Shard) -> None:
        if not isinstance(loader, DataLoader):
            raise PlanError(
                f"train_dataloader is a {type(loader).__name__}; IPUStrategy needs a torch DataLoader, whose batch size is the micro-batch"
            )
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise PlanError(
                f"train_dataloader is a {type(loader).__name__} with an iteration of its own; IPUStrategy needs a plain DataLoader"
            )
        if loader.batch_size is None:
            what = "batch_size=None" if loader.batch_sampler is None else f"batch_sampler={type(loader.batch_sampler).__name__}"
            raise PlanError(
                f"train_dataloader has {what}: IPUStrategy forms the batches itself; give the loader batch_size=MICRO_BATCH and a sampler"
            )
        _refuse_shared_out(loader, "train_dataloader")
        self.user_loader, self.seed, self.micro_batch_size, self.shard = loader, seed, loader.batch_size, shard
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self._began: tuple[int, Any] | None = None  # of a stream: an epoch, and the data set's state at its beginning
        self.samples: int | None
        self.short_samples = 0  # of a stream's epoch, in micro-batches that were not full
        if self.is_stream:
            counted = _Counted(loader.collate_fn)
            self.loader = _rebuilt(loader, seed=seed, dataset=loader.dataset, batch_size=loader.batch_size, collate_fn=counted)
            # Several workers each form micro-batches of their own, and how many samples each of them has is not known.
            is_counted = hasattr(loader.dataset, "__len__") and loader.num_workers <= 1
            self.samples = len(loader.dataset) if is_counted else None
        else:
            try:
                self.samples = len(loader.sampler)
            except TypeError:
                raise PlanError(
                    f"the sampler {type(loader.sampler).__name__} has no length, so an epoch has none; give it a __len__"
                ) from None
            self._batches = MicroBatchSampler(loader.sampler, seed=seed, micro_batch_size=loader.batch_size, shard=shard)
            dataset = SeededDataset(loader.dataset, seed=seed, collate_fn=loader.collate_fn)
            self.loader = _rebuilt(loader, seed=seed, dataset=dataset, batch_sampler=self._batches)

    def example(self) -> Any:
        """The first micro-batch of the first epoch, on the host, in this process; the same in every process."""
        with preserved_streams():
            return self.loader.collate_fn(self.loader.dataset.__getitems__((0, self._first_order[: self.micro_batch_size])))

    def again(self, epoch: int, number: int) -> Any:
        """Load a micro-batch that has been trained on again, on the host, without moving the order of samples."""
        with preserved_streams():
            if self.is_stream:
                began, state = self._began, state_of(self._source)
                batch = next(islice(self._stream(epoch), number, None))
                self._began = began
                if state is not None:
                    self._source.load_state_dict(state)
                return batch
            order = epoch_order(copy(self._batches.sampler), seed=self.seed, epoch=epoch)
            rows = order[number * self.micro_batch_size : (number + 1) * self.micro_batch_size]
            return self.loader.collate_fn(self.loader.dataset.__getitems__((epoch, rows)))

    @cached_property
    def _first_order(self) -> list[Any]:
        """The first epoch's order, by a copy of the sampler: the user's may count its epochs."""
        return epoch_order(copy(self._batches.sampler), seed=self.seed, epoch=0)

    def fingerprint(self) -> str:
        """A word for the order and two samples of the first epoch: the same in all processes whose data sets are."""
        order, word = self._first_order, hashlib.blake2b()
        word.update(repr((len(order), order[:1], order[-1:])).encode())
        with preserved_streams():
            samples = self.loader.dataset.__getitems__((0, [*order[:1], *order[-1:]]))
        for leaf in tree_flatten(samples)[0]:
            if isinstance(leaf, torch.Tensor):
                word.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            elif isinstance(leaf, (int, float, str, bytes)) or hasattr(leaf, "tobytes"):  # numbers and text, arrays and images
                word.update(leaf.tobytes() if hasattr(leaf, "tobytes") else repr(leaf).encode())
        return word.hexdigest()

    @property
    def draws_here(self) -> bool:
        """Whether fetching a micro-batch may draw from this process's random streams."""
        return not (self.is_stream or self.loader.num_workers or self.loader.dataset.draws_nothing)

    @property
    def micro_batches(self) -> int | None:
        """Full micro-batches in an epoch; None for a stream of unknown length."""
        return None if self.samples is None else self.samples // self.micro_batch_size

    def epoch(self, epoch: int, *, first: int, last: int | None) -> Iterator[Any]:
        """Micro-batches number `first` to `last` of an epoch, on the host, one at a time."""
        if not self.is_stream:
            self._batches.epoch, self._batches.first, self._batches.last = epoch, first, last
            self.loader.generator.manual_seed(mix(self.seed, _LOADER, epoch))  # of which the workers get their seeds
            return iter(self.loader)
        return islice(self._stream(epoch), first, last)

    @property
    def _source(self) -> Any:
        """What decides the order: the user's sampler, or the stream."""
        return self.user_loader.dataset if self.is_stream else self._batches.sampler

    def order_state(self, epoch: int) -> Any:
        """The state of the user's sampler or stream before this epoch, None where it has no `state_dict`."""
        began = self._began if self.is_stream else self._batches.began
        return began[1] if began is not None and began[0] == epoch else state_of(self._source)

    def go_on(self, state: Any, *, epoch: int, made_in: int) -> None:
        """Bring the user's sampler or stream, made in epoch `made_in`, to its state before `epoch`.

        Its own `state_dict` is loaded if it has one. A user's sampler without one may count epochs or draw random numbers of its own: it is
        iterated through the past epochs. torch's samplers, and those with `set_epoch`, need neither.
        """
        source = self._source
        if state is not None and hasattr(source, "load_state_dict"):
            source.load_state_dict(state)
        elif not self.is_stream and type(source) not in _WITHOUT_A_PAST and not hasattr(source, "set_epoch"):
            for past in range(made_in, epoch):
                epoch_order(source, seed=self.seed, epoch=past)

    def _stream(self, epoch: int) -> Iterator[Any]:
        """An IterableDataset's micro-batches; what its own process draws for number k is a function of (seed, epoch, k)."""
        dataset = self.user_loader.dataset
        if self._began is not None and self._began[0] == epoch and self._began[1] is not None:
            dataset.load_state_dict(deepcopy(self._began[1]))  # this epoch was begun before and abandoned
        self._began = epoch, state_of(dataset)
        if hasattr(self.user_loader.dataset, "set_epoch"):
            self.user_loader.dataset.set_epoch(epoch)
        self.loader.generator.manual_seed(mix(self.seed, _LOADER, epoch))  # of which the workers get their seeds
        stream, number = iter(self.loader), 0
        self.short_samples = 0
        while True:
            with preserved_streams():
                seed_all(mix(self.seed, _STREAM, epoch, number))
                try:
                    samples, micro_batch = next(stream)
                except StopIteration:
                    return
            if samples < self.micro_batch_size:
                self.short_samples += samples
                continue
            yield micro_batch
            number += 1


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


class EvaluationData:
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
        _refuse_shared_out(loader, "an evaluation's loader")
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
            self.loader = _rebuilt(loader, seed=seed, dataset=dataset, batch_sampler=sized)
        elif count > 1:
            raise PlanError(
                f"a {type(loader.dataset).__name__} or a loader without batch_sampler is evaluated by one process only, not {count}"
            )
        elif type(loader).__iter__ is DataLoader.__iter__ and loader.num_workers:  # unchanged, but with workers that ignore signals
            order = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
            batches = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            self.loader = _rebuilt(loader, seed=seed, dataset=loader.dataset, **order, **batches)

    @property
    def _iterator(self) -> Any:
        return self.loader._iterator  # as in HostSteps

    @_iterator.setter
    def _iterator(self, value: None) -> None:
        self.loader._iterator = value

    @property
    def left_out(self) -> int:
        """Samples that the user's own loader would have left out of the evaluation."""
        if self._sizes is None or type(self.user_loader.batch_sampler) is not BatchSampler or not self.user_loader.drop_last:
            return 0
        return len(self.user_loader.sampler) % self.user_loader.batch_size

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        seeded = self.loader is not self.user_loader  # sample by sample
        if self._guarded:
            with preserved_streams():
                if seeded:
                    self.loader.generator.manual_seed(mix(self.seed, _LOADER))  # the same every time: workers get their seeds from it
                else:
                    seed_all(mix(self.seed, _EVALUATE))
                batches = iter(self.loader)
        else:
            batches = iter(self.loader)
        for number in itertools.count():
            try:
                if self._guarded and not self.loader.num_workers:
                    with preserved_streams():
                        if not seeded:
                            seed_all(mix(self.seed, _EVALUATE, number))
                        batch = next(batches)
                else:
                    batch = next(batches)
            except StopIteration:
                return
            self.size = self._sizes.popleft() if self._sizes is not None else None
            yield batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("loader", "user_loader"):
            raise AttributeError(name)
        return getattr(self.user_loader, name)
