"""Small training runs for the tests: modules, data sets, and a `fit` under a plan or under stock Lightning."""

import csv
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_ipu import IPUStrategy

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
SHORT = {"R": "replication_factor", "A": "gradient_accumulation_factor", "D": "device_iterations"}
STRATEGY = set(inspect.signature(IPUStrategy).parameters)

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_trainer(*, seed: int = 1, stock: bool = False, **options: Any) -> pl.Trainer:
    """A quiet Trainer; R, A, D and the strategy's other options make its plan, the rest is the Trainer's own."""
    options = {SHORT.get(name, name): value for name, value in options.items()}
    plan = {name: options.pop(name) for name in STRATEGY & set(options) - {"accelerator"}}
    pl.seed_everything(seed, verbose=False)
    strategy = "auto" if stock else IPUStrategy(**plan)
    return pl.Trainer(strategy=strategy, **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **QUIET, **options})


def fit(module: pl.LightningModule, *loaders: Any, ckpt_path: Any = None, **options: Any) -> pl.Trainer:
    """Fit under a plan (R=, A=, D=, ...) or, with `stock=True`, under Lightning's own strategy."""
    trainer = make_trainer(**options)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


# ---- Modules ----------------------------------------------------------------------------------------------------------------------


class Ledger(pl.LightningModule):
    """One weight from 0, loss = w x mean(x), lr 1: -w is the sum over weight updates of the mean of x over the update's samples."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.seen: list[list[float]] = []

    def training_step(self, batch, batch_idx):
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        self.seen.append(x.flatten().tolist())
        return self.w * x.float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Block(nn.Module):
    def __init__(self, width: int, norm: bool, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.norm(self.linear(x)).relu())


def blocks(*, depth: int = 3, width: int = 8, norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """Residual blocks `0.0`, `0.1`, ... and a classifier `1`."""
    return nn.Sequential(nn.Sequential(*(Block(width, norm, dropout) for _ in range(depth))), nn.Linear(width, 3))


class Net(pl.LightningModule):
    """A classifier of (x, y, index) batches that notes which samples and losses every micro-batch had."""

    def __init__(self, network: Callable[[], nn.Module] = blocks, optimizer: Callable = sgd, schedule: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = network()
        self._optimizer, self._schedule = optimizer, schedule
        self.seen, self.losses, self.rates = [], [], []

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        loss = F.cross_entropy(self(x), y)
        self.seen.append(index.tolist())
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_accuracy", (logits.argmax(1) == y).double().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch[2]

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = self._optimizer(self.parameters())
        if self._schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._schedule(self, optimizer)}


# ---- Data -------------------------------------------------------------------------------------------------------------------------


def classes(samples: int, *, width: int = 8, seed: int = 5, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Random (x, y, index) samples of three classes."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(samples, width, generator=generator, dtype=dtype), torch.randint(3, (samples,), generator=generator)
    return TensorDataset(x, y, torch.arange(samples))


def loader(dataset: Dataset | int, micro_batch: int = 1, **options: Any) -> DataLoader:
    """A DataLoader; a number stands for so many ones (the ledger's x)."""
    if isinstance(dataset, int):
        dataset = TensorDataset(torch.ones(dataset))
    return DataLoader(dataset, batch_size=micro_batch, **options)


def numbered(samples: int, micro_batch: int = 1, **options: Any) -> DataLoader:
    """A loader whose sample k is the number k."""
    return loader(TensorDataset(torch.arange(samples, dtype=torch.float32)), micro_batch, **options)


# ---- What came out ----------------------------------------------------------------------------------------------------------------


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest difference between two sets of tensors, relative to the largest value."""
    assert ours.keys() == theirs.keys()
    largest = max(float(value.detach().abs().max()) for value in theirs.values())
    return max(float((ours[name].detach().double() - theirs[name].detach().double()).abs().max()) for name in ours) / largest


def equal_states(ours: nn.Module, theirs: nn.Module) -> bool:
    """Whether weights and buffers are equal bit for bit."""
    ours, theirs = ours.state_dict(), theirs.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def csv_logger(folder: Path) -> CSVLogger:
    return CSVLogger(folder, name="", version="")


def csv_rows(folder: Path) -> list[dict[str, float]]:
    """The rows of a metrics.csv, without the cells that are empty."""
    with open(folder / "metrics.csv") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
