"""The CosmoFlow Lightning module: its scale and scores, the logarithm on the device, and the same numbers under every plan."""

from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from runs import difference, fit, make_trainer, weights
from torch.utils.data import DataLoader, TensorDataset

from cosmoflow_ipu.module import OPTIMIZERS, CosmoFlowModule
from cosmoflow_ipu.universe import PARAMETERS

SMALL = {"network": "cosmoflow-mlperf", "conv_size": 2, "fc1_size": 8, "fc2_size": 8, "learning_rate": 0.01, "standardise": False}


def cubes(samples: int, *, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.poisson(torch.ones(samples, 4, 32, 32, 32), generator=generator).to(torch.int16)
    return TensorDataset(counts, 2 * torch.rand(samples, 4, generator=generator) - 1)


def module(**options) -> CosmoFlowModule:
    torch.manual_seed(0)
    return CosmoFlowModule(**{**SMALL, **options})


def test_a_constant_gets_half_on_the_benchmarks_scale_and_the_scores_are_those_of_all_samples():
    one = module()
    torch.nn.init.zeros_(one.network.fc3.weight)
    data = cubes(11)
    targets = data.tensors[1].double()
    (scores,) = make_trainer().validate(one, DataLoader(data, batch_size=4), verbose=False)
    assert scores["val_mae"] == pytest.approx(targets.abs().mean().item(), rel=1e-5) and 0.35 < scores["val_mae"] < 0.65
    assert scores["val_loss"] == pytest.approx(targets.square().mean().item(), rel=1e-5)
    for number, name in enumerate(PARAMETERS):
        column = targets[:, number]
        assert scores[f"val_mae_{name}"] == pytest.approx(column.abs().mean().item(), rel=1e-5)
        assert scores[f"val_r2_{name}"] == pytest.approx(1 - column.square().sum().item() / ((column - column.mean()) ** 2).sum().item())
    assert scores["val_r2"] == pytest.approx(np.mean([scores[f"val_r2_{name}"] for name in PARAMETERS]))


@pytest.mark.parametrize("plan", [{}, {"R": 2, "D": 3}], ids=str)
@pytest.mark.parametrize("apply_log", [True, False])
def test_validate_and_predict_agree_and_the_transform_is_in_the_checkpoint(tmp_path, plan, apply_log):
    data = cubes(10)
    trained = module(apply_log=apply_log)
    trainer = fit(trained, DataLoader(data, batch_size=2), **plan)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = CosmoFlowModule.load_from_checkpoint(tmp_path / "x.ckpt")
    assert again.hparams.apply_log is apply_log
    (scores,) = make_trainer().validate(again, DataLoader(data, batch_size=4), verbose=False)
    predicted = torch.cat(make_trainer().predict(again, DataLoader(data, batch_size=3)))
    assert (predicted - data.tensors[1]).abs().mean().item() == pytest.approx(scores["val_mae"], rel=1e-5)

    volumes = data.tensors[0].float()
    expected = volumes.log1p() if apply_log else volumes / volumes.mean((1, 2, 3, 4), keepdim=True)
    with torch.no_grad():
        torch.testing.assert_close(again.network.eval()(expected), predicted, rtol=1e-4, atol=1e-5)


def test_the_logarithm_is_taken_before_counts_are_cast_to_sixteen_bits():
    one = module(conv_size=1)
    seen = []
    one.network.features[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    counts = torch.full((1, 4, 32, 32, 32), 30_001, dtype=torch.int16)
    with torch.autocast("cpu", torch.bfloat16):
        one(counts)
    assert seen[0].dtype == torch.float32 and seen[0].flatten()[0].item() == pytest.approx(np.log1p(30_001), rel=1e-6)
    assert seen[0].is_contiguous(memory_format=torch.channels_last_3d)
    assert one.double()(counts).dtype == torch.float64


def test_channels_are_standardised_by_training_volumes_once_and_the_checkpoint_keeps_it(tmp_path):
    data = cubes(8)
    data.tensors[0][:, 2] *= 3

    class Data(pl.LightningDataModule):
        def sample_counts(self):
            return data.tensors[0]

        def train_dataloader(self):
            return DataLoader(data, batch_size=4)

    one = module(standardise=True)
    trainer = fit(one, Data(), R=2)
    volumes = data.tensors[0].float().log1p()
    seen = one.transform(data.tensors[0])
    torch.testing.assert_close(seen.mean((0, 2, 3, 4)), torch.zeros(4), rtol=0, atol=1e-4)
    torch.testing.assert_close(seen.std((0, 2, 3, 4)), torch.ones(4), rtol=0, atol=1e-4)
    torch.testing.assert_close(seen[:, 2] * one.transform.std[2] + one.transform.mean[2], volumes[:, 2])
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = CosmoFlowModule.load_from_checkpoint(tmp_path / "x.ckpt")
    assert torch.equal(again.transform(data.tensors[0]), seen)
    data.tensors[0].mul_(2)
    fit(again, Data())  # what was measured stays
    assert torch.equal(again.transform.std, one.transform.std)
    with pytest.raises(ValueError, match="standardise=True needs a data module with sample_counts"):
        fit(module(standardise=True), DataLoader(data, batch_size=4))


@pytest.mark.parametrize("constant", [0, 5])
def test_volumes_without_any_deviation_are_trained_on_and_scored(constant):
    counts = torch.full((4, 4, 32, 32, 32), constant, dtype=torch.int16)
    counts[:, 1] = torch.arange(32, dtype=torch.int16)  # one channel has a deviation
    data = TensorDataset(counts, torch.full((4, 4), 0.3))

    class Data(pl.LightningDataModule):
        def sample_counts(self):
            return counts

        def train_dataloader(self):
            return DataLoader(data, batch_size=2)

        val_dataloader = train_dataloader

    one = module(standardise=True)
    trainer = fit(one, Data())
    assert all(value.isfinite().all() for value in weights(one).values()) and np.isfinite(float(trainer.callback_metrics["train_loss"]))
    seen = one.transform(counts)
    assert seen[:, [0, 2, 3]].abs().max() < 1e-5 and seen[:, 1].std().item() == pytest.approx(1, abs=1e-3)
    assert one.transform.std[[0, 2, 3]].tolist() == [1, 1, 1]
    (scores,) = make_trainer().validate(one, Data(), verbose=False)
    assert np.isfinite(scores["val_mae"]) and np.isnan(scores["val_r2"])  # all targets are alike: nothing to explain


def test_an_empty_universe_divided_by_its_mean_is_empty():
    counts = torch.zeros(2, 4, 32, 32, 32, dtype=torch.int16)
    counts[1] += 3
    seen = module(apply_log=False).transform(counts)
    assert (seen[0] == 0).all() and (seen[1] == 1).all()


def test_every_parameter_of_a_subclass_is_trained():
    class Scaled(CosmoFlowModule):
        def __init__(self):
            super().__init__(**SMALL, momentum=0.0, schedule="const", l2=0.01)
            self.scale = torch.nn.Parameter(torch.ones(4))

        def forward(self, counts):
            return super().forward(counts) * self.scale

    torch.manual_seed(0)
    one, data = Scaled(), cubes(2)
    with torch.no_grad():
        outputs = one(data.tensors[0])
    gradient = (2 * (outputs - data.tensors[1]) * outputs / outputs.numel()).sum(0)
    fit(one, DataLoader(data, batch_size=2), max_steps=1)
    torch.testing.assert_close(one.scale.detach(), 1 - 0.01 * gradient, rtol=0, atol=1e-6)


def test_predictions_in_physical_units_need_the_spread():
    data = cubes(3)
    unit, physical = (module(predict_units=units, physical_spread=0.1).eval() for units in ("unit", "physical"))
    centre = torch.tensor([0.3, 0.8, 0.96, 70.0])
    with torch.no_grad():
        torch.testing.assert_close(physical.predict_step(data.tensors, 0), centre * (1 + 0.1 * unit.predict_step(data.tensors[0], 0)))
    with pytest.raises(ValueError, match="predict_units='physical' needs physical_spread"):
        module(predict_units="physical")


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputation_and_stages_change_no_number_dropout_included(dropout):
    """Ten weight updates in 32 bits."""
    runs, data = [], cubes(20)
    for options in ({}, {"recompute": True}, {"recompute": True, "num_stages": 2}, {"D": 5}):
        one = module(dropout=dropout)
        one.losses = []
        step = one.training_step
        one.training_step = lambda batch, batch_idx, step=step, one=one: one.losses.append(step(batch, batch_idx)) or one.losses[-1]
        state = torch.get_rng_state()
        fit(one, DataLoader(data, batch_size=2, shuffle=True), max_steps=10, **options)
        torch.set_rng_state(state)
        runs.append((weights(one), [loss.item() for loss in one.losses]))
    for other in runs[1:]:
        assert other[1] == pytest.approx(runs[0][1], rel=1e-6) and difference(other[0], runs[0][0]) < 1e-6
    assert len(runs[0][1]) == 10


def test_every_factoring_of_the_global_batch_trains_the_same_weights():
    data = cubes(24)
    results = []
    for replicas, accumulation, micro_batch in ((1, 1, 8), (2, 2, 2), (4, 1, 2), (1, 8, 1)):
        one = module()
        fit(one, DataLoader(data, batch_size=micro_batch), R=replicas, A=accumulation)
        results.append(weights(one))
    assert all(difference(other, results[0]) < 1e-6 for other in results[1:])


def test_l2_is_keras_on_the_two_hidden_dense_kernels_alone():
    one = module(l2=0.01, learning_rate=0.5, momentum=0.0, schedule="const")
    before = weights(one)
    one._trainer, one._fabric = SimpleNamespace(estimated_stepping_batches=1), None
    optimizer = one.configure_optimizers()["optimizer"]
    for parameter in one.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in weights(one).items():
        shrunk = 1 - 0.5 * 0.02 if name in ("network.fc1.weight", "network.fc2.weight") else 1.0
        torch.testing.assert_close(value, before[name] * shrunk)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains(optimizer):
    one = module(optimizer=optimizer)
    before = weights(one)
    fit(one, DataLoader(cubes(8), batch_size=4))
    assert difference(weights(one), before) > 0 and one.trainer.optimizers[0].__class__ is OPTIMIZERS[optimizer]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "LBFGS"}, "optimizer='LBFGS' is unknown: choose from SGD, Adadelta"),
        ({"optimizer": "Adam", "momentum": 0.9}, "momentum=0.9 means nothing to optimizer='Adam'"),
        ({"learning_rate": 0}, "learning_rate=0 must be above 0"),
        ({"l2": -1}, "l2=-1 must be at least 0"),
        ({"network": "resnet", "l2": 0.1, "conv_size": None}, "l2=0.1 means nothing to network='resnet'"),
        ({"schedule": "const", "decay_values": [1.0]}, "decay_values="),
    ],
)
def test_options_that_cannot_be_are_said_with_their_value(options, message):
    with pytest.raises(ValueError, match=message):
        module(**options)
