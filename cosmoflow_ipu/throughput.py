"""How fast a training set is read when nothing else is done: the command's --data-benchmark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from cosmoflow_ipu.data import CosmoFlowDataModule, CubeDataset
from lightning_ipu.command.run import CommandLine


class _Batches(Dataset):
    """A part's micro-batches in one order; a loader's workers read whole ones."""

    def __init__(self, part: CubeDataset, order: list[list[int]]) -> None:
        self.part, self.order = part, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> Any:
        return self.part.seeded_batch(self.order[number], seed=0, epoch=0)


def reading_rates(data: CosmoFlowDataModule, *, epochs: int) -> Iterator[tuple[float, float]]:
    """Read the training set in a random order and do nothing else: (GB/s of counts, samples/s) of each epoch."""
    part, size = data.train_dataloader().dataset, data.micro_batch_size
    for epoch in range(epochs):
        order = torch.randperm(len(part), generator=torch.Generator().manual_seed(epoch)).tolist()
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        loader = DataLoader(_Batches(part, batches), batch_size=None, num_workers=data.num_workers, generator=torch.Generator())
        start, nbytes = time.perf_counter(), 0
        for batch in loader:
            counts, _ = data.on_before_batch_transfer(batch, 0)
            nbytes += counts.nbytes
        seconds = time.perf_counter() - start
        yield nbytes / seconds / 1e9, len(order) / seconds


class DataBenchmark(CommandLine):
    """The command with everything built as for training, which then reads the training set three times in a random order."""

    trains = False

    @override
    def fit(self, **arguments: Any) -> None:
        self.datamodule.prepare_data()
        print("Epoch, Bandwidth(GB/s), Samples/Second")
        for epoch, (bandwidth, rate) in enumerate(reading_rates(self.datamodule, epochs=3), start=1):
            print(f"{epoch}, {bandwidth:.3f}, {rate:.1f}", flush=True)

    @override
    def after_fit(self) -> None:
        """Nothing: nothing was trained."""
