"""Runs that are spread over processes: the table of cases, and the worker that torchrun starts to go through them.

    torchrun --nproc-per-node 2 tests/equivalence/processes.py FOLDER

Every case whose number of processes it is runs in turn in one process group; the first process saves what came out as FOLDER/NAME.pt.
"""

import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import loaded  # noqa: F401, I001
import averaged
import filled
import hooked
import logged
import numpy
import pytorch_lightning as pl
import reported
import shaped
import stopped
import torch
from pytorch_lightning.callbacks import BaseFinetuning, LambdaCallback, ModelPruning
from pytorch_lightning.utilities import CombinedLoader
from runs import Net, blocks, classes, fit, loader, sgd
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAUROC

from lightning_ipu import PlanError
from resnet_ipu.networks import resnet

adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
OPTIMIZERS = {"momentum": sgd, "adamw": adamw}


class Skip(nn.Module):
    """Four layers, the first of which the last one needs as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.first(x).relu()
        late = self.third(self.second(early).relu()).relu()
        return self.head(torch.cat([early, late], dim=1))


class Chance(nn.Module):
    """A layer that draws from the streams of numpy and Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (numpy.random.rand() + random.random()) if self.training else x


def drawing(norm: bool = True) -> nn.Sequential:
    """Blocks that draw from every stream."""
    network = blocks(depth=5, norm=norm, dropout=0.3)
    for block in network[0]:
        block.drop = nn.Sequential(block.drop, Chance())
    return network


class Checkpointed(nn.Module):
    """A block that checkpoints itself, as transformers and timm do on request."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def checkpointed(block: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(nn.Sequential(*map(Checkpointed, block[0])), nn.Linear(8, 3))


NETWORKS = {
    "checkpointed": lambda: checkpointed(drawing(norm=False)),
    "checkpointed norms": lambda: checkpointed(drawing()),
    "blocks": partial(blocks, depth=5),
    "normed": partial(blocks, depth=5, norm=True),
    "dropout": partial(blocks, depth=5, norm=True, dropout=0.3),
    "drawing": drawing,
    "skip": Skip,
    "resnet": lambda: resnet("8", num_classes=3, in_channels=1).to(memory_format=torch.channels_last),
}


class Spread(Net):
    """The classifier of the other tests, with noise around its forward where asked, a metric with list states, and sync_dist."""

    once_per_host_step = True

    def __init__(self, network: str, optimizer: str, noise: bool = False) -> None:
        super().__init__(NETWORKS[network], OPTIMIZERS[optimizer])
        self.network_factory, self.noise, self.auroc = NETWORKS[network], noise, MulticlassAUROC(3)
        self.shown: list[tuple[int, list[int]]] = []  # to hooks: number and samples

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        if self.noise:
            x = x + 0.1 * torch.randn_like(x) * numpy.random.rand() * random.random()
        loss = F.cross_entropy(self(x), y)
        if self.noise:
            loss = loss * (1 + 0.1 * torch.rand(()) * numpy.random.rand() * random.random())
        self.seen.append(index.tolist())
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("one", 1.0, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.shown.append((batch_idx, batch[2].tolist()))

    def on_train_batch_end(self, *_):
        states = [value for state in self.trainer.optimizers[0].state.values() for value in state.values() if torch.is_tensor(value)]
        self.held = sum(tensor.untyped_storage().nbytes() for tensor in [*self.parameters(), *states] if tensor.numel() > 1)

    def validation_step(self, batch, batch_idx):
        x, y, index = batch
        logits = self(x)
        self.auroc.update(logits.softmax(1), y)
        self.log("val_auroc", self.auroc)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_one", 1.0, sync_dist=True)
        self.log("val_index", index.double().mean(), sync_dist=True)


class Keeping(Spread):
    """Buffers that only the step uses, one of them replaced, a count of steps, and outputs for a hook."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps, self.sizes = 0, []
        self.register_buffer("mean", torch.full((8,), 0.1))
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.steps += 1
        loss = super().training_step([(x - self.mean) / self.steps, y, index], batch_idx)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return {"loss": loss, "size": torch.tensor(len(x))}

    def on_train_batch_end(self, outputs, *_):
        super().on_train_batch_end()
        self.sizes.append(int(outputs["size"]))


class NoisyGradients(Spread):
    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad += 0.1 * torch.randn_like(parameter)


MODULES = {"Spread": Spread, "Keeping": Keeping, "NoisyGradients": NoisyGradients}


def case(name: str, processes: int, network: str, optimizer: str = "momentum", **plan: Any) -> dict[str, Any]:
    return {"name": name, "processes": processes, "network": network, "optimizer": optimizer, **plan}


TWO, FOUR = ["network.0.2"], ["network.0.1", "network.0.3", "network.1"]
# AdamW goes without BatchNorm: it magnifies the rounding of gradients that BatchNorm makes zero.
CASES = [
    # replicas in different processes
    case("replicas", 2, "blocks", R=2, A=2),
    case("replicas in turn", 2, "normed", R=4, A=2, D=3),
    case("clipped replicas", 2, "resnet", R=2, A=1, gradient_clip_val=0.5),
    case("replicas in float64", 2, "normed", R=2, A=2, precision="64-true"),
    case("replicas with workers and noisy gradients", 2, "dropout", R=2, A=2, workers=2, module="NoisyGradients"),
    case("four replicas", 4, "normed", R=4, A=2, D=3, validation=10_003),
    case("eight replicas", 4, "blocks", "adamw", R=8, A=1),
    # stages in different processes
    case("1F1B", 2, "normed", R=1, A=4, pipeline_splits=TWO),
    case("GPipe", 2, "blocks", "adamw", R=1, A=2, pipeline_splits=TWO, pipeline_schedule="GPipe", gradient_clip_val=0.5),
    case("Sequential", 2, "blocks", "adamw", R=1, A=3, pipeline_splits=TWO, pipeline_schedule="Sequential"),
    case("recomputed 1F1B", 2, "resnet", "adamw", R=1, A=4, pipeline_splits=["network.layer2"], recompute=True, D=3),
    case("Interleaved, stages merged", 2, "normed", R=1, A=4, pipeline_splits=FOUR, pipeline_schedule="Interleaved"),
    case("noise", 2, "drawing", R=1, A=4, pipeline_splits=TWO, noise=True, recompute=True),
    case("checkpoints of its own", 2, "checkpointed", R=1, A=4, pipeline_splits=TWO),
    case("checkpoints with statistics", 2, "checkpointed norms", R=1, A=3, pipeline_splits=TWO, pipeline_schedule="Sequential"),
    case("Grouped, a skip over a stage", 2, "skip", R=1, A=2, pipeline_splits=["network.third"], pipeline_schedule="Grouped"),
    case("validation in stages", 2, "resnet", R=1, A=2, pipeline_splits=["network.layer3"], pipeline_validation=True),
    case("what a step keeps", 2, "dropout", R=1, A=2, pipeline_splits=TWO, module="Keeping"),
    case("balanced", 2, "normed", R=1, A=4, num_stages=2),
    case("four stages", 4, "skip", R=1, A=4, pipeline_splits=["network.second", "network.third", "network.head"], precision="64-true"),
    # both
    case("2 x 2", 4, "normed", R=2, A=2, pipeline_splits=TWO, gradient_clip_val=0.5),
    case("2 x 2 GPipe, recomputed", 4, "resnet", R=2, A=2, pipeline_splits=["network.layer2"], pipeline_schedule="GPipe", recompute=True),
    case("2 x 2 with noise, validated in stages", 4, "drawing", R=2, A=2, pipeline_splits=TWO, noise=True, pipeline_validation=True),
    case("2 x 2 x 2 in turn", 4, "blocks", "adamw", R=2, A=2, pipeline_splits=FOUR, validation_replicas=3),
]


def dataset(case: dict[str, Any], samples: int, seed: int = 5) -> TensorDataset:
    """The samples of a case: images for the ResNet, rows for the others."""
    dtype = torch.float64 if case.get("precision") == "64-true" else torch.float32
    if case["network"] != "resnet":
        return classes(samples, seed=seed, dtype=dtype)
    x, y, index = classes(samples, width=64, seed=seed, dtype=dtype).tensors
    return TensorDataset(x.view(-1, 1, 8, 8), y, index)


def run(case: dict[str, Any], devices: int) -> tuple[Spread, pl.Trainer]:
    """Train a case for two epochs of two weight updates and a remainder."""
    options = {name: value for name, value in case.items() if name not in ("name", "processes", "network", "optimizer", "noise", "module")}
    workers, validation = options.pop("workers", 0), options.pop("validation", 21)
    module = MODULES[case.get("module", "Spread")](case["network"], case["optimizer"], case.get("noise", False))
    samples = dataset(case, 4 * case["R"] * case["A"] * 2 + 5)
    training = loader(samples, 4, shuffle=True, num_workers=workers)
    trainer = fit(
        module,
        training,
        loader(dataset(case, validation, seed=6), 4 if validation < 100 else 100),
        devices=devices,
        max_epochs=2,
        num_sanity_val_steps=0,
        **options,
    )
    return module, trainer


def outcome(module: Spread, trainer: pl.Trainer) -> dict[str, Any]:
    """What is compared: state by name, the optimizer's state, metrics; equal in every process."""
    return {
        "weights": {name: value.detach().clone() for name, value in module.named_parameters()},
        "buffers": {name: value.clone() for name, value in module.named_buffers()},
        "optimizer": trainer.strategy.optimizer_state(trainer.optimizers[0])["state"],
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "seen": module.seen,
        "held": module.held,
    }


class Thawing(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.network[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        pass


class Stream(IterableDataset):
    def __iter__(self):
        return iter(classes(64))


class Twice(Spread):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]) + self(batch[0]), batch[1])


class Never(Spread):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch[0]), batch[1])


class Decayed(Spread):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1]) + sum(p.square().sum() for p in self.parameters())


class Beforehand(Spread):
    def __init__(self):
        super().__init__("blocks", "momentum")
        self.embed = nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(self.embed(batch[0])), batch[1])


class Watching(Spread):
    def training_step(self, batch, batch_idx):
        self.log("norm", self.network[0][0].linear.weight.norm())
        return super().training_step(batch, batch_idx)


class Leaves(nn.Linear):
    def forward(self, x):
        self.extra = x.square().mean()
        return super().forward(x)


class Collecting(Spread):
    def __init__(self):
        super().__init__("blocks", "momentum")
        self.network[0][0].linear = Leaves(8, 8)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1]) + self.network[0][0].linear.extra


class Synchronised(Spread):
    def __init__(self):
        super().__init__("blocks", "momentum")
        self.network[0][0].norm = nn.SyncBatchNorm(8)


class Following(Spread):
    """A second network that moves within the step, as momentum encoders do, or after it, by what this process has seen."""

    def __init__(self, within):
        super().__init__("blocks", "momentum")
        self.within, self.slow = within, nn.Linear(8, 3).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if self.within:
            with torch.no_grad():
                self.slow.weight.mul_(0.9)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_):
        self.slow.weight += self.losses[-1]


class Measuring(Spread):
    def on_before_optimizer_step(self, optimizer):
        self.log("norm", sum(float(p.grad.norm()) for p in self.parameters() if p.grad is not None))


class Gathering(Spread):
    def training_step(self, batch, batch_idx):
        self.all_gather(batch[0])
        return super().training_step(batch, batch_idx)


class Sparse(Spread):
    def __init__(self):
        super().__init__("blocks", "momentum")
        self.words = nn.Embedding(3, 8, sparse=True)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0] + self.words(batch[1])), batch[1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Choosing(nn.Module):
    """Uses a layer of its first half for micro-batches of three samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.sometimes(x) if len(x) == 3 else x)


def of_differing_sizes(samples):
    return default_collate([sample for sample in samples if sample[2] % 3])


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(F.dropout(self.first(x), 0.5, self.training))


NETWORKS |= {"tied": Tied, "draws": Draws, "choosing": Choosing}
PIPELINE = {"A": 2, "pipeline_splits": TWO}


class Drawing(Spread):
    def validation_step(self, dataloader_iter):
        next(dataloader_iter)


def with_validation(loaders: Any, module: type[Spread] = Spread) -> tuple[Any, ...]:
    return lambda: module("blocks", "momentum"), classes(64), {"R": 2, "validation": loaders}


REFUSALS = {  # what is refused by two processes: (module, training data, options)
    "several calls": (lambda: Twice("blocks", "momentum"), classes(64), PIPELINE),
    "no call": (lambda: Never("blocks", "momentum"), classes(64), PIPELINE),
    "a loss on other stages": (lambda: Decayed("blocks", "momentum"), classes(64), PIPELINE),
    "tied weights": (lambda: Spread("tied", "momentum"), classes(64), {"A": 2, "pipeline_splits": ["network.last"]}),
    "functional randomness": (lambda: Spread("draws", "momentum"), classes(64), {"A": 2, "pipeline_splits": ["network.last"]}),
    "statistics in a checkpoint": (lambda: Spread("checkpointed norms", "momentum"), classes(64), PIPELINE | {"A": 4}),
    "statistics in a checkpoint, grouped": (
        lambda: Spread("checkpointed norms", "momentum"),
        classes(64),
        PIPELINE | {"A": 2, "pipeline_schedule": "GPipe"},
    ),
    "a layer for some shapes": (
        lambda: Spread("choosing", "momentum"),
        DataLoader(classes(64), batch_size=4, collate_fn=of_differing_sizes),
        {"A": 4, "pipeline_splits": ["network.last"]},
    ),
    "1F1B with too few micro-batches": (lambda: Spread("blocks", "momentum"), classes(64), {"A": 1, "pipeline_splits": TWO}),
    "a layer before the call": (Beforehand, classes(64), PIPELINE),
    "a weight of an earlier stage": (lambda: Watching("blocks", "momentum"), classes(64), PIPELINE),
    "what an earlier stage left": (Collecting, classes(64), PIPELINE),
    "too many balanced stages": (lambda: Spread("skip", "momentum"), classes(64), {"A": 8, "num_stages": 4}),
    "SyncBatchNorm": (Synchronised, classes(64), {"R": 2}),
    "a parameter moved in a step": (lambda: Following(True), classes(64), {"R": 2}),
    "replicas that drift apart": (lambda: Following(False), classes(64), {"R": 2}),
    "gradient norms in a pipeline": (lambda: Measuring("blocks", "momentum"), classes(64), PIPELINE),
    "all_gather in a step": (lambda: Gathering("blocks", "momentum"), classes(64), {"R": 2}),
    "sparse gradients": (Sparse, classes(64), {"R": 2}),
    "a share of a share": (
        lambda: Spread("blocks", "momentum"),
        DataLoader(classes(64), batch_size=4, sampler=DistributedSampler(classes(64), num_replicas=2, rank=0)),
        {"R": 2},
    ),
    "a stream": (lambda: Spread("blocks", "momentum"), Stream(), {"R": 2}),
    "loaders at once": with_validation(CombinedLoader({"a": loader(classes(21), 4), "b": loader(classes(12), 4)}, "min_size")),
    "no DataLoader": with_validation(range(3)),
    "drawn batches": with_validation(loader(classes(21), 4), Drawing),
    "a callback that prunes": (
        lambda: Spread("blocks", "momentum"),
        classes(64),
        {**PIPELINE, "callbacks": ModelPruning("l1_unstructured")},
    ),
    "a callback that thaws": (lambda: Spread("blocks", "momentum"), classes(64), {**PIPELINE, "callbacks": Thawing()}),
    "three replicas": (lambda: Spread("blocks", "momentum"), classes(64), {"R": 3}),
}


def refusal(name: str) -> str:
    """The message with which a run is refused; empty if it was not."""
    make, samples, options = REFUSALS[name]
    options = dict(options)
    validation = options.pop("validation", None)
    try:
        training = samples if isinstance(samples, DataLoader) else DataLoader(samples, batch_size=4)
        fit(make(), training, validation, devices=2, **options)
    except PlanError as error:
        return str(error)
    return ""


def cores(processes: int, **options: Any) -> list[tuple[set[int], set[int]]]:
    """The cores that each process may run on, with any of its threads, in a fit and after it."""
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.extend(cpu for thread in os.listdir("/proc/self/task") for cpu in os.sched_getaffinity(int(thread)))

    module = Spread("blocks", "momentum")
    trainer = fit(module, loader(classes(16), 4), R=processes, devices=processes, callbacks=[LambdaCallback(on_train_end=look)], **options)
    return trainer.strategy._processes.gathered((set(seen), os.sched_getaffinity(0)))


def main(folder: Path, processes: int) -> None:
    torch.set_num_threads(1)
    for number, case in enumerate(CASES):
        if case["processes"] != processes:
            continue
        module, trainer = run(case, processes)
        result = outcome(module, trainer)
        result["everyone's metrics"] = trainer.strategy._processes.gathered(result["metrics"])
        result["everyone's bytes"] = trainer.strategy._processes.gathered(module.held)
        result["shown"] = trainer.strategy._processes.gathered(module.shown)
        result["rows"] = torch.cat([torch.as_tensor(rows) for rows in trainer.predict(module, loader(dataset(case, 21), 4))]).tolist()
        if case["name"] == "2 x 2":
            trainer.save_checkpoint(folder / "two-by-two.ckpt")
        if trainer.is_global_zero:
            torch.save(result, folder / f"{number}.pt")
    shapes = {name: shaped.run(name) for name, case in shaped.CASES.items() if case["processes"] == processes}
    if torch.distributed.get_rank() == 0:
        torch.save(shapes, folder / f"shaped-{processes}.pt")
    if processes == 2:
        decisions = {(plan, hook): stopped.decide(2, plan, hook) for plan in stopped.PLANS for hook in stopped.DECISIONS}
        stops, fills = stopped.run(2), {plan: filled.run(2, plan) for plan in filled.PLANS}
        average, logs = averaged.run(2), {plan: logged.run(2, plan) for plan in logged.PLANS}
        reports = {plan: reported.run(2, plan) for plan in reported.PLANS}
        hooks = {(plan, late): hooked.run(2, plan, late) for plan in hooked.PLANS for late in (False, True)}
        messages = {name: refusal(name) for name in REFUSALS}
        bound, free = (cores(2), cores(2, bind_cores=False)) if hasattr(os, "sched_getaffinity") else ([], [])
        if torch.distributed.get_rank() == 0:
            torch.save(average, folder / "averaged.pt")
            torch.save(logs, folder / "logged.pt")
            torch.save(reports, folder / "reported.pt")
            torch.save(stops, folder / "stopped.pt")
            torch.save(decisions, folder / "decisions.pt")
            torch.save(fills, folder / "filled.pt")
            torch.save(hooks, folder / "hooked.pt")
            torch.save(messages, folder / "refusals.pt")
            torch.save({True: bound, False: free}, folder / "cores.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]))
