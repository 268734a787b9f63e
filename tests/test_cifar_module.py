"""The CIFAR Lightning module: the original recipe against a loop by hand, mirrored evaluation, whitening before training."""

import copy

import pytest
import torch
from runs import fit, make_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cifar_ipu.data import ImageDataModule
from cifar_ipu.module import PATCHES_FROM, CIFARModule
from cifar_ipu.networks import WhiteningConv2d
from lightning_ipu.cutting.partition import cut

ORIGINAL = {"optimizer": "sgd", "learning_rate": 0.01, "momentum": 0.0, "l2_regularization": 0.0, "schedule": "const"}


def images(samples: int, *, side: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(samples, 1, side, side, generator=generator), torch.randint(10, (samples,), generator=generator))


def small(**options) -> CIFARModule:
    return CIFARModule(**{"in_channels": 1, "image_size": 12, **options})


@pytest.mark.parametrize("network", ["keras", "estimator"])
def test_the_original_recipe_is_plain_gradient_descent_on_the_mean_cross_entropy(network):
    module = small(network=network, channels_last=False, **ORIGINAL)
    for layer in module.network:
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    by_hand, data = copy.deepcopy(module.network), images(24)
    for first in range(0, 24, 8):  # three weight updates of two replicas
        loss = F.cross_entropy(by_hand(data.tensors[0][first : first + 8]), data.tensors[1][first : first + 8])
        for parameter, gradient in zip(by_hand.parameters(), torch.autograd.grad(loss, list(by_hand.parameters())), strict=True):
            parameter.data -= 0.01 * gradient
    trainer = fit(module, DataLoader(data, batch_size=4), R=2)
    assert trainer.global_step == 3
    for ours, theirs in zip(module.network.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_mirrored_evaluation_scores_the_mean_of_both_images_logits_and_leaves_training_alone():
    module, data = small(network="keras", mirror_evaluation=True), images(10)
    pixels, labels = data.tensors
    plain = small(network="keras")
    plain.load_state_dict(module.state_dict())
    with torch.no_grad():
        network = copy.deepcopy(module.network).eval()  # a fit keeps the modes that it finds
        logits = (network(pixels) + network(pixels.flip(3))) / 2
    expected = {"loss": float(F.cross_entropy(logits, labels)), "accuracy": float((logits.argmax(1) == labels).double().mean())}
    trainer = make_trainer()
    loader = DataLoader(data, batch_size=4)  # the last batch is short
    for split, run in (("val", trainer.validate), ("test", trainer.test)):
        assert run(module, loader, verbose=False)[0] == pytest.approx({f"{split}_{name}": v for name, v in expected.items()}, rel=1e-5)
    torch.testing.assert_close(torch.cat(trainer.predict(module, loader)), logits.softmax(1))
    assert trainer.test(plain, loader, verbose=False)[0]["test_loss"] != pytest.approx(expected["loss"], rel=1e-4)
    for either in (module, plain):
        fit(either, loader, max_steps=2)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def test_filters_are_whitened_from_training_images_before_training_and_stay_as_they_are(tmp_path):
    data = ImageDataModule(dataset="SAMPLE", micro_batch_size=8, validation_split=0)
    expected = WhiteningConv2d(1, 3)
    expected.fit(data.sample_images(PATCHES_FROM))
    module = CIFARModule(network="whitened", in_channels=1, image_size=28)
    trainer = make_trainer(max_epochs=1, limit_train_batches=2, default_root_dir=tmp_path)
    trainer.fit(module, datamodule=data)
    assert torch.equal(module.network.whiten.weight, expected.weight)

    # A checkpoint brings its own filters, also into a run on other images.
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    loaded = CIFARModule.load_from_checkpoint(tmp_path / "run.ckpt")
    assert loaded.hparams == module.hparams and torch.equal(loaded.network.whiten.weight, expected.weight)
    other = ImageDataModule(dataset="FASHION-MNIST", synthetic="host", synthetic_samples=64, micro_batch_size=8, validation_split=0)
    with pytest.warns(UserWarning, match="the training set has 64 samples, but that of the run to be resumed had 2000"):
        make_trainer(max_epochs=2, limit_train_batches=1).fit(loaded, datamodule=other, ckpt_path=tmp_path / "run.ckpt")
    assert torch.equal(loaded.network.whiten.weight, expected.weight)
    # So do loaded weights that are trained on, and what is fitted twice: all later layers have learned from these filters.
    loaded = CIFARModule.load_from_checkpoint(tmp_path / "run.ckpt")
    for again in (loaded, module):
        make_trainer(max_steps=1).fit(again, datamodule=other)
        assert torch.equal(again.network.whiten.weight, expected.weight)
    fresh = CIFARModule(network="whitened", in_channels=1, image_size=28)
    assert not fresh.network.whiten.fitted and not fresh.bfloat16().network.whiten.fitted and module.bfloat16().network.whiten.fitted


def test_whitening_needs_a_data_module_that_shows_images():
    with pytest.raises(ValueError, match="network='whitened' needs a data module with sample_images"):
        fit(small(network="whitened"), DataLoader(images(8), batch_size=4))


@pytest.mark.parametrize("network", ["keras", "estimator", "whitened"])
def test_stages_that_begin_at_any_layer_give_the_whole_networks_logits(network):
    module = CIFARModule(network=network).eval()
    pixels = torch.randn(2, 3, 32, 32)
    names = [f"network.{name}" for name, _ in module.network.named_children()]
    for splits in ([names[len(names) // 2]], names[1:]):
        partition = cut(module, (pixels,), splits=splits, training=False)
        values = partition.flatten(pixels)
        for stage in partition.stages:
            values = stage(*values)
        assert len(partition.stages) == len(splits) + 1
        torch.testing.assert_close(partition.restore(values), module(pixels))


def test_wrong_options_are_named():
    for options, message in (
        ({"network": "lenet"}, "network='lenet' is unknown: choose from keras, estimator, whitened"),
        ({"image_size": 8}, "image_size=8 leaves nothing after two poolings"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum=0.9 means nothing to optimizer='adamw'"),
    ):
        with pytest.raises(ValueError, match=message):
            CIFARModule(**options)
