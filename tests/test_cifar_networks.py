"""The CIFAR networks in plain torch: layers, parameters, initial weights, and what whitening does to patches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cifar_ipu.networks import NETWORKS, ConvGroup, WhiteningConv2d, keras_cnn

ORIGINAL = """conv 32 same, relu, conv 32, relu, pool, dropout .25, conv 64 same, relu, conv 64, relu, pool, dropout .25, flatten, dense 512, relu,
    dropout .5, dense 10"""


def described(layer: nn.Module) -> str:
    """A layer in the words of the programs that the networks come from."""
    match layer:
        case nn.Conv2d(kernel_size=(3, 3), padding=padding):
            return f"conv {layer.out_channels}" + (" same" if padding == (1, 1) else "")
        case nn.Linear():
            return f"dense {layer.out_features}"
        case nn.Dropout():
            return f"dropout {layer.p:g}".replace("0.", ".")
        case nn.MaxPool2d(kernel_size=2, stride=2):
            return "pool"
    return {nn.ReLU: "relu", nn.Flatten: "flatten"}[type(layer)]


@pytest.mark.parametrize(("name", "parameters"), [("keras", 1_250_858), ("estimator", 1_260_106)])
def test_the_original_networks_have_the_originals_layers_and_parameters(name, parameters):
    layers = " ".join(ORIGINAL.split()).split(", ")
    if name == "estimator":
        layers.insert(4, "conv 32")  # which no activation follows
    network = NETWORKS[name]()
    assert [described(layer) for layer in network] == layers
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_weights_start_as_keras_draws_them_and_biases_at_zero():
    for name, layer in keras_cnn().named_children():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            area = 9 if isinstance(layer, nn.Conv2d) else 1
            bound = (6 / (area * (layer.weight.shape[0] + layer.weight.shape[1]))) ** 0.5
            assert layer.weight.abs().max() <= bound and not layer.bias.any(), name
            assert float(layer.weight.detach().var()) == pytest.approx(bound**2 / 3, rel=0.2), name


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("channels", "size", "classes"), [(3, 32, 100), (1, 28, 10)])
def test_every_network_takes_every_data_set_and_all_its_trainable_parameters_learn(name, channels, size, classes):
    network = NETWORKS[name](num_classes=classes, in_channels=channels, image_size=size)
    logits = network(torch.randn(4, channels, size, size))
    F.cross_entropy(logits, torch.arange(4)).backward()
    assert logits.shape == (4, classes)
    for parameter_name, parameter in network.named_parameters():
        learns = parameter.grad is not None and bool(parameter.grad.any())
        assert learns == (not parameter_name.startswith("whiten")), parameter_name


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_can_begin_a_stage(name):
    network = NETWORKS[name]().eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for position in range(1, len(network)):
            assert torch.equal(network[position:](network[:position](images)), network(images))


@pytest.mark.parametrize(("name", "size"), [("keras", 10), ("estimator", 12), ("whitened", 9)])
def test_images_that_are_too_small_are_refused_with_the_smallest_size(name, size):
    assert NETWORKS[name](image_size=size).eval()(torch.zeros(1, 3, size, size)).shape == (1, 10)
    with pytest.raises(ValueError, match=f"image_size={size - 1} leaves nothing .* at least {size} pixels"):
        NETWORKS[name](image_size=size - 1)


@pytest.mark.parametrize(("channels", "kernel"), [(1, 3), (3, 2)])
def test_whitened_patches_have_no_correlation_and_variance_one(channels, kernel):
    mixing = torch.randn(channels, channels, 3, 3)
    images = F.conv2d(torch.randn(64, channels, 20, 20), mixing, padding=1)  # neighbouring pixels and channels are correlated
    layer = WhiteningConv2d(channels, kernel)
    layer.fit(images, eps=0.0)
    with torch.no_grad():
        responses = layer(images).transpose(0, 1).flatten(1)
    half = channels * kernel**2
    torch.testing.assert_close(responses[:half].cov(), torch.eye(half), atol=2e-3, rtol=0)
    assert torch.equal(responses[half:], -responses[:half])
    # Filters are in the order of what they say about images, with the largest entry above 0.
    variances = 1 / layer.weight[:half].flatten(1).square().sum(1)
    assert (variances.diff() <= 0).all()
    filters = layer.weight[:half].flatten(1)
    assert (filters.gather(1, filters.abs().argmax(1, keepdim=True)) > 0).all()


def test_whitening_does_not_amplify_what_hardly_occurs():
    layer = WhiteningConv2d(1, 2)
    layer.fit(torch.ones(2, 1, 8, 8) * torch.arange(2.0).view(2, 1, 1, 1), eps=0.01)  # plain images: one direction in four
    assert float(layer.weight.detach().flatten(1).norm(dim=1).max()) == pytest.approx(0.01**-0.5, rel=1e-4)


def test_a_group_halves_the_image_and_adds_each_later_convolution_to_its_input():
    group = ConvGroup(8, 16, depth=2).eval()
    images = torch.randn(2, 8, 13, 13)
    with torch.no_grad():
        both = group(images)
        nn.init.zeros_(group.rest[0][0].weight)
        first = group(images)  # the second convolution now says nothing
    assert both.shape == (2, 16, 6, 6)
    torch.testing.assert_close(first, F.gelu(group.norm1(F.max_pool2d(group.conv1(images), 2))))
    assert not torch.allclose(both, first)
