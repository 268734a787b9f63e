"""A user's training loader: the micro-batches of any epoch from any position on, the same in every placement and after every interruption."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from copy import copy, deepcopy
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_ipu.data.attributes import OPAQUE, attribute_fingerprints
from lightning_ipu.data.order import WITHOUT_A_PAST, MicroBatchSampler, Share, epoch_order, state_of
from lightning_ipu.data.samples import LOADER, Counted, SeededDataset, rebuilt, refuse_shared_out
from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import mix, name_word, preserved_streams, seed_all

_STREAM = name_word("stream")


class TrainingData:
    """A user's training loader, in an order and with draws that depend on the seed and the epoch alone.

    Args:
        loader: a torch DataLoader; its batch size is the micro-batch.
        seed: of the order and of the samples' randomness.
        share: the micro-batches that this process needs.

    Raises:
        PlanError: a loader whose order or batches the strategy cannot control.
    """

    def __init__(self, loader: DataLoader, *, seed: int, share: Share) -> None:
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
        refuse_shared_out(loader, "train_dataloader")
        self.user_loader, self.seed, self.micro_batch_size, self.share = loader, seed, loader.batch_size, share
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self._began: tuple[int, Any] | None = None  # of a stream: an epoch, and the data set's state at its beginning
        self._opened: tuple[int, int, Iterator[Any]] | None = None  # a stream that is being read: epoch, the next micro-batch's number
        self._made: dict[str, str] | None = None  # what a stream held when it was made
        self._seen: Any = None  # the micro-batch that `go_on` was asked to keep
        self.samples: int | None
        self.short_samples = 0  # of a stream's epoch, in micro-batches that were not full
        if self.is_stream:
            counted = Counted(loader.collate_fn)
            self.loader = rebuilt(loader, seed=seed, dataset=loader.dataset, batch_size=loader.batch_size, collate_fn=counted)
            # Several workers each form micro-batches of their own, and how many samples each of them has is not known.
            is_counted = hasattr(loader.dataset, "__len__") and loader.num_workers <= 1
            self.samples = len(loader.dataset) if is_counted else None
            if not loader.num_workers and state_of(loader.dataset) is None and not hasattr(loader.dataset, "set_epoch"):
                self._made = attribute_fingerprints(vars(loader.dataset))
        else:
            try:
                self.samples = len(loader.sampler)
            except TypeError:
                raise PlanError(
                    f"the sampler {type(loader.sampler).__name__} has no length, so an epoch has none; give it a __len__"
                ) from None
            self._batches = MicroBatchSampler(loader.sampler, seed=seed, micro_batch_size=loader.batch_size, share=share)
            dataset = SeededDataset(loader.dataset, seed=seed, collate_fn=loader.collate_fn)
            self.loader = rebuilt(loader, seed=seed, dataset=dataset, batch_sampler=self._batches)

    def example(self) -> Any:
        """The first micro-batch of the first epoch, on the host, in this process; the same in every process."""
        with preserved_streams():
            return self.loader.collate_fn(self.loader.dataset.__getitems__((0, self._first_order[: self.micro_batch_size])))

    def again(self, epoch: int, number: int) -> Any:
        """Load a micro-batch that has been trained on again, on the host, without moving the order of samples."""
        with preserved_streams():
            if self.is_stream:
                if self._seen is not None:
                    return self._seen
                began, state = self._began, state_of(self._source)
                stream = self._stream(epoch)
                batch = next(islice(stream, number, None))
                if state is None:  # reading it again could give other data
                    self._opened = epoch, number + 1, stream
                    return batch
                self._began = began
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
        """A hash of the order and of two samples of the first epoch, to be compared between processes."""
        order, digest = self._first_order, hashlib.blake2b()
        digest.update(repr((len(order), order[:1], order[-1:])).encode())
        with preserved_streams():
            samples = self.loader.dataset.__getitems__((0, [*order[:1], *order[-1:]]))
        for leaf in tree_flatten(samples)[0]:
            if isinstance(leaf, torch.Tensor):
                digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            elif isinstance(leaf, (int, float, str, bytes)) or hasattr(leaf, "tobytes"):  # numbers and text, arrays and images
                digest.update(leaf.tobytes() if hasattr(leaf, "tobytes") else repr(leaf).encode())
        return digest.hexdigest()

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
            self.loader.generator.manual_seed(mix(self.seed, LOADER, epoch))  # of which the workers get their seeds
            return iter(self.loader)
        opened, self._opened, self._seen = self._opened, None, None
        if opened is not None and opened[0] == epoch and opened[1] <= first:
            _, read, stream = opened
            return islice(stream, first - read, None if last is None else last - read)
        return islice(self._stream(epoch), first, last)

    @property
    def _source(self) -> Any:
        """What decides the order: the user's sampler, or the stream."""
        return self.user_loader.dataset if self.is_stream else self._batches.sampler

    def order_state(self, epoch: int) -> Any:
        """The state of the user's sampler or stream before this epoch, None where it has no `state_dict`."""
        began = self._began if self.is_stream else self._batches.began
        return began[1] if began is not None and began[0] == epoch else state_of(self._source)

    @property
    def moves(self) -> bool:
        """Whether a stream without `state_dict` and `set_epoch` may have come to hold something else by being read."""
        if self._made is None:
            return False
        words = attribute_fingerprints(vars(self._source))
        return words != self._made or OPAQUE in words.values()

    def go_on(self, state: Any, *, epoch: int, made_in: int, moves: bool, last: int | None, seen: tuple[int, int] | None) -> None:
        """Bring the user's sampler or stream, made in epoch `made_in`, to its state before `epoch`.

        Its own `state_dict` is loaded if it has one. A user's sampler without one may count epochs or draw random numbers of its own: it is
        iterated through the past epochs. torch's samplers, and those with `set_epoch`, need neither. A stream is read through them if it
        `moves`.

        Args:
            state: that the sampler or stream had then, None where it has no `state_dict`.
            epoch, made_in: see above.
            moves: what `moves` said in the run to be resumed.
            last: micro-batches in an epoch; None for a stream of unknown length.
            seen: epoch and number of a micro-batch that `again` will be asked for.
        """
        source = self._source
        if state is not None and hasattr(source, "load_state_dict"):
            source.load_state_dict(state)
        elif self.is_stream and moves:
            for past in range(made_in, epoch):
                for number, batch in enumerate(self.epoch(past, first=0, last=last)):
                    if (past, number) == seen:
                        kept = batch
            if seen is not None and seen[0] < epoch:
                self._seen = kept
        elif not self.is_stream and type(source) not in WITHOUT_A_PAST and not hasattr(source, "set_epoch"):
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
        self.loader.generator.manual_seed(mix(self.seed, LOADER, epoch))  # of which the workers get their seeds
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
