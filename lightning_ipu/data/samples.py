"""Fetch samples under seeds of their own: a sample's randomness is a function of (seed, epoch, index), whoever fetches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from lightning_ipu.data.order import EVALUATE
from lightning_ipu.data.workers import Loader
from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import mix, name_word, seed_all

_SAMPLE, LOADER = name_word("sample"), name_word("loader")


def _tensors_of(dataset: Dataset) -> tuple[TensorDataset, list[Sequence[int]]] | None:
    """The TensorDataset that a data set is or is a subset of, and the subsets' indices from the outside in; None for any other."""
    levels = []
    while type(dataset) is Subset:
        levels.append(dataset.indices)
        dataset = dataset.dataset
    return (dataset, levels) if type(dataset) is TensorDataset else None


class Counted:
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
        stream = mix(self.seed, EVALUATE) if epoch is None else mix(self.seed, _SAMPLE, epoch)
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


def rebuilt(loader: DataLoader, *, seed: int, **changed: Any) -> Loader:
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
    generator = torch.Generator().manual_seed(mix(seed, LOADER))
    return Loader(**{**options, **changed, "generator": generator})


class InPlaceOfLoader:
    """Base of what Lightning gets in place of a user's DataLoader: iterates over another `loader`; other attributes are the `user_loader`'s."""

    loader: DataLoader
    user_loader: DataLoader

    @property
    def _iterator(self) -> Any:
        """Lightning ends persistent workers through this attribute."""
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, value: None) -> None:
        self.loader._iterator = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("loader", "user_loader"):
            raise AttributeError(name)
        return getattr(self.user_loader, name)


def refuse_shared_out(loader: DataLoader, name: str) -> None:
    if isinstance(loader.sampler, DistributedSampler):
        raise PlanError(
            f"{name} has a {type(loader.sampler).__name__}; IPUStrategy shares the samples out itself and would take a share of its share: give"
            " the loader the whole data set, with shuffle=True or a sampler of your own"
        )
