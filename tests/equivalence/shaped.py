"""Micro-batches of differing shapes: text of varying length, its batch dimension second, from which the collation leaves samples out.

The network's output is nested and holds None, whole numbers and what is as long as the text; BatchNorm and a centred output tell how many samples
went through together.
"""

from typing import Any

import pytorch_lightning as pl
import torch
from runs import fit
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_ipu.randomness import mix

TWO, FOUR = ["network.second"], ["network.first", "network.second", "network.head"]
CASES: dict[str, dict[str, Any]] = {
    "1F1B": {"processes": 2, "A": 4, "pipeline_splits": TWO, "pipeline_validation": True},
    "GPipe, recomputed": {"processes": 2, "A": 3, "pipeline_splits": TWO, "pipeline_schedule": "GPipe", "recompute": ["network.second"]},
    "Sequential": {"processes": 2, "A": 2, "pipeline_splits": TWO, "pipeline_schedule": "Sequential", "pipeline_validation": True},
    "dropout": {"processes": 2, "A": 4, "pipeline_splits": TWO, "recompute": ["network.second"], "dropout": 0.4},
    "2 x 2 on two": {"processes": 2, "R": 2, "A": 2, "pipeline_splits": TWO, "pipeline_validation": True},
    "2 x 2": {"processes": 4, "R": 2, "A": 3, "D": 2, "pipeline_splits": TWO, "pipeline_validation": True},
    "four stages": {"processes": 4, "A": 5, "pipeline_splits": FOUR, "pipeline_validation": True},
}

Sample = tuple[list[int], int]


def texts(number: int, seed: int) -> list[Sample]:
    """Texts of 2 to 6 words, and their classes."""
    return [
        ([1 + mix(seed, index, place) % 9 for place in range(2 + mix(seed, index) % 5)], mix(seed, index, 99) % 3)
        for index in range(number)
    ]


def collate(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Words by (place, text), filled up by 0 to the longest text; those that begin with word 1 are left out."""
    kept = [sample for sample in samples if sample[0][0] != 1]
    longest = max(len(words) for words, _ in kept)
    words = torch.tensor([words + [0] * (longest - len(words)) for words, _ in kept])
    return words.T.contiguous(), torch.tensor([label for _, label in kept])


class Text(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(10, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout))
        self.norm, self.head = nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)

    def forward(self, words):
        mask = words != 0
        x = self.first(self.words(words)).relu() * mask.unsqueeze(-1)
        lengths = mask.sum(0)
        pooled = self.norm(self.second(x).sum(0) / lengths.unsqueeze(-1))
        logits = self.head(pooled)
        return {"logits": logits - logits.mean(0), "states": (x, None), "lengths": lengths, "of": "text"}


def loss_of(network: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    out = network(batch[0])
    assert out["states"][1] is None and out["of"] == "text" and out["states"][0].shape[:2] == batch[0].shape
    return F.cross_entropy(out["logits"], batch[1]) + out["states"][0].square().mean() * out["lengths"].float().mean()


class Module(pl.LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = Text(dropout)

    def forward(self, words):
        return self.network(words)

    def training_step(self, batch, batch_idx):
        return loss_of(self, batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", loss_of(self, batch), batch_size=len(batch[1]))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])["lengths"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loaders(case: dict[str, Any]) -> tuple[list[Sample], list[list[Sample]]]:
    """The training set, three weight updates of micro-batches of 6 and a remainder, and two validation sets whose last batch is short."""
    return texts(6 * case.get("R", 1) * case["A"] * 3 + 4, 1), [texts(14, 2), texts(21, 3)]


def run(name: str, devices: int | None = None) -> dict[str, Any]:
    """Train a case on its processes, or on so many, then test and predict; what came out is the same in all."""
    case = CASES[name]
    training, validation = loaders(case)
    evaluated = [DataLoader(one, batch_size=6, collate_fn=collate) for one in validation]
    module = Module(case.get("dropout", 0.0))
    plan = {key: value for key, value in case.items() if key not in ("processes", "dropout")}
    trainer = fit(
        module,
        DataLoader(training, batch_size=6, collate_fn=collate),
        evaluated,
        devices=devices or case["processes"],
        num_sanity_val_steps=1,
        **plan,
    )
    validated = {key: value.item() for key, value in trainer.callback_metrics.items()}
    tested = trainer.test(module, evaluated, verbose=False)
    return {
        "weights": {key: value.detach().clone() for key, value in module.named_parameters()},
        "validated": [validated[f"val/dataloader_idx_{place}"] for place in (0, 1)],
        "tested": [tested[place][f"val/dataloader_idx_{place}"] for place in (0, 1)],
        "predicted": torch.cat(trainer.predict(module, evaluated[0])).tolist(),
    }
