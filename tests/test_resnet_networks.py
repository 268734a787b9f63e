"""ResNet and ResNeXt: shapes, gradients and parameter counts of every size, and equality with torchvision's networks."""

import pickle

import pytest
import torch
import torchvision
from torch import nn

from resnet_ipu.networks import SIZES, STEMS, BasicBlock, Bottleneck, ZeroPadShortcut, resnet

TORCHVISION = {
    "18": torchvision.models.resnet18,
    "34": torchvision.models.resnet34,
    "50": torchvision.models.resnet50,
    "101": torchvision.models.resnet101,
    "152": torchvision.models.resnet152,
    "x50": torchvision.models.resnext50_32x4d,
    # torchvision offers 32x8d and 64x4d under a name; its class builds 32x4d as well.
    "x101": lambda: torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4),
}


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


DEEP = ("101", "152", "x101")  # their stems are those of the other sizes


def on_meta(size: str, **options) -> nn.Module:
    with torch.device("meta"):
        return resnet(size, **options)


def blocks_of(network: nn.Module) -> list[nn.Module]:
    return [module for module in network.modules() if isinstance(module, BasicBlock | Bottleneck)]


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("size", [size for size in SIZES if size not in DEEP])
def test_every_size_takes_either_stem_and_every_parameter_learns(size, stem):
    torch.manual_seed(0)
    network = resnet(size, num_classes=7, in_channels=1, stem=stem)
    side = 12 if stem == "cifar" else 40

    logits = network(torch.randn(3, 1, side, side))
    logits.logsumexp(1).sum().backward()

    assert logits.shape == (3, 7) and logits.isfinite().all()
    for name, parameter in network.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


@pytest.mark.parametrize("size", DEEP)
def test_every_parameter_of_the_deep_sizes_learns(size):
    test_every_size_takes_either_stem_and_every_parameter_learns(size, "cifar")


@pytest.mark.parametrize("size", TORCHVISION)
def test_imagenet_sizes_have_torchvisions_parameters_name_for_name(size):
    with torch.device("meta"):
        theirs = TORCHVISION[size]().state_dict()
    ours = on_meta(size, num_classes=1000, stem="imagenet").state_dict()

    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in theirs.items()}


@pytest.mark.parametrize("size", ["18", "50", "x50"])
def test_torchvisions_state_dict_gives_torchvisions_outputs(size):
    torch.manual_seed(0)
    theirs = TORCHVISION[size]()
    theirs(torch.randn(4, 3, 64, 64))  # running statistics other than 0 and 1
    ours = resnet(size, num_classes=1000, stem="imagenet")
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(2, 3, 96, 80)

    with torch.no_grad():
        expected, got = theirs.eval()(images), ours.eval()(images)

    assert torch.equal(got, expected)


@pytest.mark.parametrize("zero_init", [False, True])
@pytest.mark.parametrize("build", [torchvision.models.resnet18, torchvision.models.resnet50])
def test_the_initial_weights_are_torchvisions_of_the_same_seed(build, zero_init):
    torch.manual_seed(5)
    theirs = build(zero_init_residual=zero_init).state_dict()
    torch.manual_seed(5)
    ours = resnet(build.__name__.removeprefix("resnet"), num_classes=1000, stem="imagenet", zero_init_last_norm=zero_init).state_dict()

    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("8", 75_290), ("20", 269_722), ("32", 464_154), ("44", 658_586), ("56", 853_018), ("14", 172_506), ("110", 1_727_962)],
)
def test_cifar_sizes_have_the_known_parameter_counts(size, parameters):
    # Counts of Graphcore's TensorFlow 2 networks; 14 and 110 by hand: every six layers more add 97,216.
    assert count(on_meta(size, num_classes=10)) == count(on_meta(size, num_classes=10, shortcut_type="A")) == parameters


@pytest.mark.parametrize(
    ("size", "stem", "shortcut_type", "parameters"),
    [
        ("8", "cifar", "B", 78_186),
        ("8", "cifar", "A", 75_434),
        ("20", "cifar", "B", 272_618),
        ("20", "cifar", "A", 269_866),
        ("18", "cifar", "B", 11_174_538),
        ("50", "cifar", "B", 23_521_418),
        ("x50", "cifar", "B", 22_993_290),
        ("18", "imagenet", "B", 11_692_648),
        ("50", "imagenet", "B", 25_560_168),
        ("x50", "imagenet", "B", 25_032_040),
    ],
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_four_channel_networks_have_the_parameter_counts_of_the_popart_ones(size, stem, shortcut_type, parameters, norm):
    classes = 10 if stem == "cifar" else 1000
    network = on_meta(size, num_classes=classes, in_channels=4, stem=stem, norm=norm, shortcut_type=shortcut_type)

    assert count(network) == parameters


@pytest.mark.parametrize("size", ["8", "18", "x50"])
def test_the_cifar_stem_keeps_the_image_size_and_is_initialised_like_every_convolution(size):
    torch.manual_seed(0)
    network = resnet(size, num_classes=10)
    seen = []
    network.layer1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[2:]))
    network.avgpool.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[2:]))
    network.eval()(torch.randn(1, 3, 32, 32))

    first = network.conv1
    assert (first.kernel_size, first.stride) == ((3, 3), (1, 1))
    assert not [module for module in network.modules() if isinstance(module, nn.MaxPool2d)]
    assert seen == [(32, 32), (8, 8) if size == "8" else (4, 4)]
    assert first.weight.std().item() == pytest.approx((2 / (9 * first.out_channels)) ** 0.5, rel=0.1)


def test_shortcut_a_takes_every_second_pixel_and_appends_zero_channels():
    images = torch.arange(2 * 3 * 5 * 5.0).reshape(2, 3, 5, 5)
    shortcut = ZeroPadShortcut(3, 8, stride=2)(images)

    assert shortcut.shape == (2, 8, 3, 3)
    assert torch.equal(shortcut[:, :3], images[:, :, [0, 2, 4]][..., [0, 2, 4]])
    assert not shortcut[:, 3:].any()


@pytest.mark.parametrize("size", ["14", "18", "50"])
def test_shortcut_types_project_nowhere_where_the_shape_changes_or_everywhere(size):
    first_blocks = {"14": [2, 4], "18": [2, 4, 6], "50": [0, 3, 7, 13]}[size]  # those that change the shape
    for shortcut_type, kind in (("A", ZeroPadShortcut), ("B", nn.Sequential)):
        shortcuts = [block.downsample for block in blocks_of(on_meta(size, num_classes=10, shortcut_type=shortcut_type))]
        assert [i for i, shortcut in enumerate(shortcuts) if shortcut is not None] == first_blocks
        assert all(isinstance(shortcuts[i], kind) for i in first_blocks)
    assert all(isinstance(block.downsample, nn.Sequential) for block in blocks_of(on_meta(size, num_classes=10, shortcut_type="C")))


@pytest.mark.parametrize("shortcut_type", ["A", "B", "C"])
@pytest.mark.parametrize("size", ["8", "50"])
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_every_shortcut_runs_with_every_norm_on_images_of_odd_size(size, norm, shortcut_type):
    network = resnet(size, num_classes=10, norm=norm, shortcut_type=shortcut_type)

    assert network(torch.randn(2, 3, 19, 17)).isfinite().all()


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("size", ["14", "50"])
def test_zero_init_makes_every_block_its_shortcut(size, norm):
    network = resnet(size, num_classes=10, norm=norm, zero_init_last_norm=True)
    zero = [name for name, parameter in network.named_parameters() if name.endswith("weight") and not parameter.any()]
    last = "bn2" if size == "14" else "bn3"

    assert len(zero) == len(blocks_of(network)) and all(f".{last}." in name for name in zero)
    images = torch.randn(2, 16 if size == "14" else 256, 8, 8).relu()
    assert torch.equal(network.layer1[1](images), images)


def test_without_norms_the_convolutions_have_biases_that_start_at_zero():
    network = resnet("14", num_classes=10, norm="none", shortcut_type="C")
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]

    assert all(convolution.bias is not None and not convolution.bias.any() for convolution in convolutions)
    assert not [name for name, _ in network.named_parameters() if "bn" in name]
    assert all(module.bias is None for module in on_meta("14", num_classes=10).modules() if isinstance(module, nn.Conv2d))


def test_group_norms_have_the_asked_number_of_groups():
    for options, groups in (({}, 16), ({"norm_groups": 4}, 4)):
        norms = [module for module in on_meta("20", num_classes=10, norm="group", **options).modules() if isinstance(module, nn.GroupNorm)]
        assert len(norms) == 19 and {norm.num_groups for norm in norms} == {groups}


def test_batch_norms_move_their_statistics_once_in_a_training_forward_and_never_in_evaluation():
    network = resnet("8", num_classes=10)
    network(torch.randn(4, 3, 8, 8))
    network.eval()(torch.randn(4, 3, 8, 8))
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]

    assert len(norms) == 7 and all(norm.num_batches_tracked == 1 and norm.momentum == 0.1 and norm.running_mean.any() for norm in norms)


def test_a_network_can_be_sent_to_another_process():
    network = resnet("8", num_classes=10, norm="group").eval()
    images = torch.randn(1, 3, 8, 8)

    assert torch.equal(pickle.loads(pickle.dumps(network))(images), network(images))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "17"}, "size='17' is unknown: choose from 8, 14, .*x101"),
        ({"stem": "mnist"}, "stem='mnist' is unknown: choose from cifar, imagenet"),
        ({"norm": "GROUP"}, "norm='GROUP' is unknown: choose from batch, group, none"),
        ({"shortcut_type": "D"}, "shortcut_type='D' is unknown: choose from A, B, C"),
        ({"norm": "group", "norm_groups": 32}, "norm_groups=32 must divide 16"),
        ({"norm": "group", "norm_groups": 0}, "norm_groups=0 must divide 16"),
        ({"size": "x50", "norm": "group", "norm_groups": 48}, "norm_groups=48 must divide 64"),
        ({"norm": "batch", "norm_groups": 16}, "norm_groups=16 belongs to norm='group'"),
        ({"norm": "none", "zero_init_last_norm": True}, "zero_init_last_norm=True needs norms"),
        ({"in_channels": 0}, "in_channels=0 must be at least 1"),
        ({"num_classes": 0}, "num_classes=0 must be at least 1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        resnet(**{"size": "8", "num_classes": 10, **options})
