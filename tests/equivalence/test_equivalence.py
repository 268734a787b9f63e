"""The plan decides the numbers: whatever runs it, weights, buffers, learning rates, losses and metrics are those of a plain loop."""

import random
from functools import partial

import numpy
import pytest
import pytorch_lightning as pl
import torch
from plain_loop import mean_loss, train
from runs import Net, blocks, classes, csv_logger, csv_rows, difference, equal_states, fit, loader, make_trainer, sgd, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

PLANS = [(1, 1, 64), (4, 2, 8), (2, 4, 8), (1, 8, 8), (8, 1, 8)]  # (R, A, micro-batch): 64 samples a weight update
adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
normed = partial(blocks, norm=True)


def cosine(module, optimizer):
    return {
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, module.trainer.estimated_stepping_batches),
        "interval": "step",
    }


def entropy(network, sample):
    x, y, _ = sample
    return F.cross_entropy(network(x), y)


def plain_run(module: Net, dataset, *, replicas: int, accumulation: int, make_optimizer):
    """The plain loop over the micro-batches that a module's run has seen, from the same initial weights."""
    dtype = next(module.parameters()).dtype
    reference = Net(module.network_factory).to(dtype)
    optimizer = make_optimizer(reference.parameters())
    micro_batches = [dataset[indices] for indices in module.seen]
    updates = len(micro_batches) // (replicas * accumulation)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    course = train(reference.network, optimizer, entropy, micro_batches, replicas=replicas, accumulation=accumulation, schedule=schedule)
    return reference, optimizer, course


def net(network=blocks, optimizer=sgd, schedule=cosine) -> Net:
    module = Net(network, optimizer, schedule)
    module.network_factory = network
    return module


@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=["momentum", "adamw"])
@pytest.mark.parametrize("network", [blocks, normed], ids=["no norm", "BatchNorm"])
@pytest.mark.parametrize(("R", "A", "micro_batch"), PLANS)
def test_every_plan_trains_what_a_plain_loop_trains(R, A, micro_batch, network, optimizer):
    dataset = classes(64 * 3 + 5)
    module = net(network, optimizer)
    trainer = fit(
        module, loader(dataset, micro_batch, shuffle=True), loader(dataset, 7), R=R, A=A, D=2, max_epochs=2, num_sanity_val_steps=0
    )
    reference, their_optimizer, course = plain_run(module, dataset, replicas=R, accumulation=A, make_optimizer=optimizer)

    assert [len(seen) for seen in module.seen] == [micro_batch] * (6 * R * A)
    for epoch in range(2):  # every sample at most once
        seen = sum(module.seen[epoch * 3 * R * A : (epoch + 1) * 3 * R * A], [])
        assert len(set(seen)) == len(seen) == 192
    assert module.rates == pytest.approx(course.rates, rel=1e-6) and len(module.rates) == 6
    # BatchNorm networks amplify the last bit from update to update.
    tolerance = 1e-6 if network is blocks else 1e-4
    assert difference(weights(module), weights(reference)) < tolerance
    assert module.losses == pytest.approx(course.losses, rel=10 * tolerance)
    for (name, ours), (_, theirs) in zip(module.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.allclose(ours.double(), theirs.double(), rtol=1e-3, atol=1e-5), name
    ours, theirs = (one.state_dict()["state"] for one in (trainer.optimizers[0], their_optimizer))
    for key, state in theirs.items():
        for name, value in state.items():
            if value is not None:
                assert torch.allclose(ours[key][name], value, rtol=1e-3, atol=1e-5), (key, name)
    metrics = trainer.callback_metrics
    assert metrics["loss_epoch"].item() == pytest.approx(sum(course.losses[3 * R * A :]) / (3 * R * A), rel=10 * tolerance)
    samples = [dataset[k : k + 1] for k in range(len(dataset))]
    assert metrics["val_loss"].item() == pytest.approx(mean_loss(module.network, entropy, samples), rel=1e-6)


@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=["momentum", "adamw"])
@pytest.mark.parametrize(("R", "A"), [(4, 2), (2, 4), (1, 8), (8, 1)])
def test_in_float64_twenty_updates_agree_within_1e_9(R, A, optimizer):
    dataset = classes(64 * 10, dtype=torch.float64)
    module = net(normed, optimizer)
    fit(module, loader(dataset, 8, shuffle=True), R=R, A=A, D=16, max_epochs=2, precision="64-true")
    reference, _, course = plain_run(module, dataset, replicas=R, accumulation=A, make_optimizer=optimizer)

    assert len(course.rates) == 20
    assert difference(weights(module), weights(reference)) < 1e-9
    assert difference(dict(module.named_buffers()), dict(reference.named_buffers())) < 1e-9


def run(network=blocks, *, plan: dict, dataset=None, micro_batch: int = 8, **options) -> Net:
    module = net(network)
    module.trained = fit(module, loader(dataset or classes(192), micro_batch, shuffle=True), max_epochs=2, **plan, **options)
    return module


def test_factorings_of_a_global_batch_agree_and_with_batchnorm_all_plans_of_one_micro_batch():
    plain = [run(plan={"R": R, "A": A}, micro_batch=micro_batch) for R, A, micro_batch in PLANS]
    for other in plain[1:]:
        assert difference(weights(other), weights(plain[0])) < 1e-6

    tenfold = [run(normed, plan={"R": R, "A": A}, precision="64-true") for R, A in [(4, 2), (2, 4), (1, 8), (8, 1)]]
    for other in tenfold[1:]:
        assert difference(weights(other), weights(tenfold[0])) < 1e-9
        assert not torch.allclose(other.network[0][0].norm.running_mean, tenfold[0].network[0][0].norm.running_mean, rtol=1e-2)
    counts = [int(one.network[0][0].norm.num_batches_tracked) for one in tenfold]
    assert counts == [12, 24, 48, 6]  # A micro-batches in each of 6 updates


@pytest.mark.parametrize("plan", [{"R": 1, "A": 1}, {"R": 2, "A": 2}], ids=str)
def test_device_iterations_leave_every_bit_alone(plan, tmp_path):
    dataset = classes(4 * 34 * plan["R"] * plan["A"])
    seen = []
    for D in (1, 3, 16):
        module = net(partial(normed, dropout=0.3))
        trainer = fit(
            module,
            loader(dataset, 4, shuffle=True, num_workers=0),
            loader(dataset, 4),
            D=D,
            max_epochs=2,
            logger=csv_logger(tmp_path / str(D)),
            log_every_n_steps=5,
            **plan,
        )
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        seen.append((module, metrics, csv_rows(tmp_path / str(D))))

    first, metrics, rows = seen[0]
    assert len(first.rates) == 68 and len({row["step"] for row in rows if "loss_step" in row}) == 13
    for other, their_metrics, their_rows in seen[1:]:
        assert equal_states(other, first)
        assert other.rates == first.rates and other.losses == first.losses and other.seen == first.seen
        assert their_metrics == metrics
        assert their_rows == rows


class Augmented(Dataset):
    """A user's data set whose samples are changed by torch, numpy and Python randomness, knowing nothing of seeds."""

    def __init__(self, samples: int) -> None:
        self.samples = classes(samples)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y, index = self.samples[index]
        return x + torch.rand(()) + numpy.random.rand() + random.random(), y, index


@pytest.mark.parametrize("plan", [{"D": 3}, {"R": 2, "A": 2, "D": 2}], ids=str)
def test_loader_workers_leave_every_bit_alone(plan):
    runs = []
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        module = net()
        trainer = fit(module, loader(Augmented(48), 4, shuffle=True, **options), loader(Augmented(10), 4, **options), max_epochs=2, **plan)
        runs.append((module, trainer.callback_metrics["val_loss"].item()))
    for module, val_loss in runs[1:]:
        assert equal_states(module, runs[0][0]) and module.losses == runs[0][0].losses and module.seen == runs[0][0].seen
        assert val_loss == runs[0][1]


@pytest.mark.parametrize("recompute", [True, [r"network\.0\.1"], ["network"]], ids=str)
@pytest.mark.parametrize("plan", [{}, {"R": 2, "A": 3, "D": 2}], ids=str)
def test_recomputation_leaves_every_bit_alone(plan, recompute):
    network = partial(blocks, norm=True, dropout=0.5)
    stored = run(network, plan=plan)
    recomputed = run(network, plan={**plan, "recompute": recompute})

    assert equal_states(recomputed, stored) and recomputed.losses == stored.losses
    assert recomputed.trained.callback_metrics["loss_epoch"] == stored.trained.callback_metrics["loss_epoch"]


@pytest.mark.parametrize(
    "stages",
    [{"pipeline_splits": ["network.0.1", "network.1"]}, {"num_stages": 3}, {"num_stages": 2, "pipeline_schedule": "GPipe"}],
    ids=str,
)
def test_stages_leave_every_bit_alone(stages):
    network = partial(blocks, norm=True, dropout=0.5)
    whole, staged = run(network, plan={"R": 2}), run(network, plan={"R": 2, **stages})

    assert equal_states(staged, whole)
    assert staged.trained.strategy.plan.num_ipus == 2 * staged.trained.strategy.plan.num_stages > 2


class Masks(nn.Module):
    """Notes which of its inputs the dropout behind it kept, on inputs of ones."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before = nn.Dropout(0.5) if before else None
        self.linear, self.drop, self.kept = nn.Linear(8, 3), nn.Dropout(0.5), []

    def forward(self, x):
        if self.before is not None:
            x = x + 0 * self.before(x)
        mask = self.drop(torch.ones_like(x))
        self.kept.append(mask.bool().flatten().tolist())
        return self.linear(x * mask)


def test_dropout_differs_between_replicas_micro_batches_and_updates_and_is_equal_in_a_rerun_whatever_stands_before_it():
    runs = []
    for before, D in ((False, 1), (False, 3), (True, 1)):
        module = net(partial(Masks, before))
        fit(module, loader(classes(72), 6), R=2, A=2, D=D, max_epochs=2)
        runs.append(module.network.kept)
    assert runs[0] == runs[1] == runs[2]
    assert len(runs[0]) == 24 and len({tuple(kept) for kept in runs[0]}) == 24


def test_another_seed_is_another_order_and_another_dropout():
    one, same, other = (run(partial(blocks, dropout=0.5), plan={}, seed=seed) for seed in (1, 1, 2))
    assert equal_states(one, same) and one.seen == same.seen
    assert one.seen != other.seen and not equal_states(one, other)


@pytest.mark.parametrize("plan", [{"D": 1}, {"D": 16}, {"R": 2, "A": 2, "D": 16}], ids=str)
def test_a_step_that_reads_the_global_step_sees_weight_updates_for_every_d(plan):
    class Annealed(Net):
        def __init__(self):
            super().__init__()
            self.steps = []

        def training_step(self, batch, batch_idx):
            self.steps.append((self.global_step, self.trainer.global_step, batch_idx))
            return super().training_step(batch, batch_idx) * 0.9**self.global_step

    module = Annealed()
    per_update = plan.get("R", 1) * plan.get("A", 1)
    fit(module, loader(classes(8 * per_update), 1), max_epochs=2, **plan)
    assert module.steps == [(k // per_update, k // per_update, k % (8 * per_update)) for k in range(16 * per_update)]


def test_with_one_replica_and_micro_batch_the_weights_are_stock_lightnings():
    ours, theirs = net(normed), net(normed)
    loaders = loader(classes(40), 4), loader(classes(10), 4)
    mine = fit(ours, *loaders, D=4, max_epochs=2)
    stock = fit(theirs, *loaders, stock=True, max_epochs=2)

    assert equal_states(ours, theirs) and ours.losses == theirs.losses and ours.rates == theirs.rates
    assert mine.global_step == stock.global_step and mine.current_epoch == stock.current_epoch
    assert mine.callback_metrics.keys() == stock.callback_metrics.keys()
    for name, value in stock.callback_metrics.items():
        assert mine.callback_metrics[name].item() == pytest.approx(value.item(), rel=1e-6), name


@pytest.mark.parametrize("strategy", ["ipu", "plan"])
def test_a_users_module_and_datamodule_train_unchanged(strategy):
    from lightning_ipu import IPUStrategy

    class Data(pl.LightningDataModule):
        def setup(self, stage):
            self.samples = classes(96)

        def train_dataloader(self):
            return loader(self.samples, 8, shuffle=True)

        def val_dataloader(self):
            return loader(self.samples, 10)

    module = net()
    trainer = make_trainer(stock=True, max_epochs=8)
    trainer = pl.Trainer(
        strategy="ipu" if strategy == "ipu" else IPUStrategy(replication_factor=2, device_iterations=3, recompute=True),
        accelerator="cpu",
        max_epochs=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Data())
    assert trainer.global_step == (96 if strategy == "ipu" else 48)
    assert trainer.callback_metrics["val_loss"] < module.losses[0]
