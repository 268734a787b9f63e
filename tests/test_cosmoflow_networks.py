"""CosmoFlow's networks: parameter counts, TensorFlow's padding and flattening, initialisation, legal options."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cosmoflow_ipu.networks import ACTIVATIONS, NETWORKS, Flatten, SameConv3d, cosmoflow

SMALL = {"input_size": 32, "conv_size": 2, "fc1_size": 8, "fc2_size": 8}


@pytest.mark.parametrize(
    ("name", "size", "channels", "parameters"),
    [
        ("cosmoflow", 64, 4, 619_956),
        ("cosmoflow", 128, 4, 2_454_964),
        ("cosmoflow-mlperf", 128, 4, 8_907_556),
        ("cosmoflow-mlperf", 64, 4, 3_270_948),  # 4 convolution layers
        ("cosmoflow-mlperf", 32, 4, 1_337_380),  # 3
        ("cosmoflow-v1", 128, 4, 72_724),
        ("resnet", 64, 4, 6_730_180),
        ("resnet", 64, 1, 6_730_180 - 3 * 7**3 * 64),
        ("cosmoflow", 64, 1, 619_956 - 3 * 2**3 * 16),
    ],
)
def test_parameter_counts_are_the_originals(name, size, channels, parameters):
    with torch.device("meta"):
        built = cosmoflow(name, input_size=size, in_channels=channels)
    assert sum(parameter.numel() for parameter in built.parameters()) == parameters


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("size", "channels"), [(32, 1), (64, 4), (48, 2)])
def test_every_network_gives_four_targets_within_1_2_and_gradients_for_all_parameters(name, size, channels):
    if name == "cosmoflow-v1" and size < 63:
        with pytest.raises(ValueError, match=f"input_size={size} leaves no voxel after 5 of 5 convolution layers"):
            cosmoflow(name, input_size=size, in_channels=channels)
        return
    built = cosmoflow(name, input_size=size, in_channels=channels)
    output = built(torch.rand(2, channels, size, size, size) * 3)
    assert output.shape == (2, 4) and output.abs().max() <= 1.2
    output.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in built.parameters())


def test_same_padding_of_an_even_kernel_stands_after_the_volume():
    convolution = SameConv3d(1, 1, 2)
    with torch.no_grad():
        convolution.bias.zero_()
    x = torch.rand(1, 1, 3, 3, 3)
    padded, kernel = np.pad(x[0, 0].numpy(), (0, 1)), convolution.weight[0, 0].detach().numpy()
    for at in np.ndindex(3, 3, 3):  # a correlation whose window starts at the voxel itself
        d, h, w = at
        assert convolution(x)[0, 0][at].item() == pytest.approx(float((padded[d : d + 2, h : h + 2, w : w + 2] * kernel).sum()), rel=1e-5)
    assert SameConv3d(1, 1, 3)(x).shape == x.shape and SameConv3d(1, 1, 3).extra == 0


def test_a_dense_weight_sees_voxels_in_the_order_depth_height_width_channel():
    x = torch.arange(2 * 3 * 2 * 2 * 2).view(2, 3, 2, 2, 2)
    expected = np.stack([np.moveaxis(sample, 0, -1).ravel() for sample in x.numpy()])
    assert np.array_equal(Flatten()(x).numpy(), expected)
    assert np.array_equal(Flatten()(x.to(memory_format=torch.channels_last_3d)).numpy(), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_pooling_before_the_activation_gives_the_originals_numbers_and_gradients(activation):
    torch.manual_seed(3)
    built = cosmoflow("cosmoflow-mlperf", hidden_activation=activation, **SMALL)
    volume = torch.rand(1, 4, 32, 32, 32, requires_grad=True)
    x = volume
    for convolution, pool, active in built.features:
        x = pool(active(convolution(x)))
    for dense, active in ((built.fc1, built.activation1), (built.fc2, built.activation2)):
        x = active(dense(x if x.dim() == 2 else built.flatten(x)))
    theirs = 1.2 * torch.tanh(built.fc3(x))
    ours = built(volume)
    assert torch.equal(ours, theirs)
    ours_grad, theirs_grad = (torch.autograd.grad(one.sum(), [volume, *built.parameters()]) for one in (ours, theirs))
    for mine, their in zip(ours_grad, theirs_grad, strict=True):
        torch.testing.assert_close(mine, their)


def test_leaky_relu_has_keras_slope_and_dropout_stands_where_the_original_has_it():
    built = cosmoflow("cosmoflow", input_size=64, dropout=0.2)
    slopes = [module.negative_slope for module in built.modules() if isinstance(module, nn.LeakyReLU)]
    assert slopes == [0.3] * 7
    assert [name for name, module in built.named_modules() if isinstance(module, nn.Dropout)] == ["dropout1", "dropout2"]
    v1 = cosmoflow("cosmoflow-v1", input_size=64, dropout=0.2)
    assert [module.p for module in v1.modules() if isinstance(module, nn.Dropout)] == [0.2] * 3


@pytest.mark.parametrize("name", ["cosmoflow", "resnet"])
def test_weights_start_glorot_uniform_and_biases_at_zero(name):
    for module in cosmoflow(name, input_size=64).modules():
        if isinstance(module, (nn.Conv3d, nn.Linear)):
            inputs, outputs, *kernel = module.weight.shape[1], module.weight.shape[0], *module.weight.shape[2:]
            bound = math.sqrt(6 / ((inputs + outputs) * math.prod(kernel)))
            assert module.weight.abs().max() <= bound and not module.bias.any()
            if module.weight.numel() > 1000:
                assert module.weight.abs().max() > 0.98 * bound
                assert module.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_the_resnets_norms_stand_on_the_channel_axis():
    built = cosmoflow("resnet", input_size=32)
    assert [norm.num_features for norm in (built.bn1, built.layer1[0].bn3, built.layer4[1].bn3)] == [64, 128, 1024]
    x = torch.randn(2, 64, 4, 4, 4) * torch.arange(1.0, 65).view(1, -1, 1, 1, 1)
    assert torch.allclose(built.bn1(x).transpose(0, 1).flatten(1).std(1), torch.ones(64), atol=0.02)
    assert sum(isinstance(module, nn.BatchNorm3d) for module in built.modules()) == 1 + 8 * 3 + 4


def test_kernel_two_convolutions_with_channels_last_compute_what_contiguous_ones_do():
    torch.manual_seed(0)
    built = cosmoflow("cosmoflow", input_size=32)
    x = torch.rand(2, 4, 32, 32, 32)
    expected = built(x)
    built.to(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(built(x.to(memory_format=torch.channels_last_3d)), expected, rtol=1e-4, atol=1e-5)
    assert F.pad(x.to(memory_format=torch.channels_last_3d), (0, 1) * 3).is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cosmoflow2"}, "network='cosmoflow2' is unknown: choose from cosmoflow, cosmoflow-mlperf, cosmoflow-v1, resnet"),
        ({"input_size": 16}, "input_size=16 must lie between 32 and 128 voxels"),
        ({"input_size": 256}, "input_size=256 must lie between 32 and 128 voxels"),
        ({"in_channels": 5}, "in_channels=5 must lie between 1 and 4"),
        ({"conv_size": 0}, "conv_size=0 must be at least 1"),
        ({"hidden_activation": "GELU"}, "hidden_activation='GELU' is unknown: choose from LeakyReLU, ReLU, ELU"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        ({"n_conv_layers": 6}, "input_size=32 leaves no voxel after 6 of 6 convolution layers"),
        ({"name": "resnet", "dropout": 0.5}, "dropout=0.5 means nothing to network='resnet'"),
    ],
)
def test_what_cannot_be_built_is_said_with_its_value(options, message):
    with pytest.raises(ValueError, match=message):
        cosmoflow(**{"name": "cosmoflow", "input_size": 32, **options})
