"""ResNet and ResNeXt, from the 8-layer CIFAR network to ResNeXt-101, in plain torch.

The ImageNet sizes carry torchvision's parameter names, so its ``state_dict``s load key for key and give its outputs. The CIFAR
sizes (6n + 2 layers of 16, 32 and 64 channels) are those of section 4.2 in He et al., https://arxiv.org/abs/1512.03385.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEMS = ("cifar", "imagenet")
NORMS = ("batch", "group", "none")
SHORTCUT_TYPES = ("A", "B", "C")

MakeNorm = Callable[[int], nn.Module]


def conv3x3(in_channels: int, out_channels: int, *, stride: int = 1, groups: int = 1, bias: bool = False) -> nn.Conv2d:
    """3x3 convolution whose padding keeps the image size at stride 1."""
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, groups=groups, bias=bias)


def conv1x1(in_channels: int, out_channels: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """1x1 convolution."""
    return nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=bias)


class ZeroPadShortcut(nn.Module):
    """Shortcut type A: keep every stride-th pixel and append zero channels; no parameters."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra_channels = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.extra_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(
        self,
        in_channels: int,
        width: int,
        out_channels: int,
        *,
        stride: int,
        groups: int,
        norm: MakeNorm,
        bias: bool,
        downsample: nn.Module | None,
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, width, stride=stride, groups=groups, bias=bias)
        self.bn1 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(width, out_channels, groups=groups, bias=bias)
        self.bn2 = norm(out_channels)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)

        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)

        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, (grouped) 3x3 and 1x1 convolutions beside a shortcut.

    The stride stands on the 3x3 convolution ("v1.5", as in torchvision); https://arxiv.org/abs/1512.03385 has it on the first 1x1.
    The parameters are the same.
    """

    expansion = 4

    def __init__(
        self,
        in_channels: int,
        width: int,
        out_channels: int,
        *,
        stride: int,
        groups: int,
        norm: MakeNorm,
        bias: bool,
        downsample: nn.Module | None,
    ) -> None:
        super().__init__()
        self.conv1 = conv1x1(in_channels, width, bias=bias)
        self.bn1 = norm(width)
        self.conv2 = conv3x3(width, width, stride=stride, groups=groups, bias=bias)
        self.bn2 = norm(width)
        self.conv3 = conv1x1(width, out_channels, bias=bias)
        self.bn3 = norm(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)

        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)

        out = self.conv3(out)
        out = self.bn3(out)

        out += identity
        return self.relu(out)


class Size(NamedTuple):
    """One row of the size table; channels double from stage to stage."""

    block: type[BasicBlock] | type[Bottleneck]
    blocks: tuple[int, ...]  # in each stage of equal image size
    stem_channels: int = 64
    groups: int = 1
    group_width: int = 64  # channels per group inside the blocks of the first stage

    def out_channels(self, stage: int) -> int:
        return (self.stem_channels * self.block.expansion) << stage


def _cifar(n: int) -> Size:
    return Size(BasicBlock, (n, n, n), stem_channels=16, group_width=16)


_TABLE = {
    "8": _cifar(1),
    "14": _cifar(2),
    "20": _cifar(3),
    "32": _cifar(5),
    "44": _cifar(7),
    "56": _cifar(9),
    "110": _cifar(18),
    "18": Size(BasicBlock, (2, 2, 2, 2)),
    "34": Size(BasicBlock, (3, 4, 6, 3)),
    "50": Size(Bottleneck, (3, 4, 6, 3)),
    "101": Size(Bottleneck, (3, 4, 23, 3)),
    "152": Size(Bottleneck, (3, 8, 36, 3)),
    "x50": Size(Bottleneck, (3, 4, 6, 3), groups=32, group_width=4),
    "x101": Size(Bottleneck, (3, 4, 23, 3), groups=32, group_width=4),
}
SIZES = tuple(_TABLE)


def _stage(size: Size, number: int, *, shortcut_type: str, norm: MakeNorm, bias: bool) -> nn.Sequential:
    """Blocks of one image size; the first of them halves the image, except in stage 0, which follows the stem."""
    in_channels = size.stem_channels if number == 0 else size.out_channels(number - 1)
    out_channels = size.out_channels(number)
    width = (size.groups * size.group_width) << number
    blocks = []
    for i in range(size.blocks[number]):
        stride = 2 if number > 0 and i == 0 else 1
        if shortcut_type != "C" and stride == 1 and in_channels == out_channels:
            downsample = None
        elif shortcut_type == "A":
            downsample = ZeroPadShortcut(in_channels, out_channels, stride=stride)
        else:
            downsample = nn.Sequential(conv1x1(in_channels, out_channels, stride=stride, bias=bias), norm(out_channels))
        options = {"stride": stride, "groups": size.groups, "norm": norm, "bias": bias, "downsample": downsample}
        blocks.append(size.block(in_channels, width, out_channels, **options))
        in_channels = out_channels
    return nn.Sequential(*blocks)


class ResNet(nn.Module):
    """Stem, three or four stages of residual blocks, global average and a linear head; `resnet` builds it and explains the options."""

    def __init__(
        self,
        size: Size,
        *,
        num_classes: int,
        in_channels: int,
        stem: str,
        shortcut_type: str,
        norm: MakeNorm,
        bias: bool,
        zero_init_last_norm: bool,
    ) -> None:
        super().__init__()
        stage = partial(_stage, size, shortcut_type=shortcut_type, norm=norm, bias=bias)

        if stem == "cifar":
            self.conv1 = conv3x3(in_channels, size.stem_channels, bias=bias)
        else:
            self.conv1 = nn.Conv2d(in_channels, size.stem_channels, 7, stride=2, padding=3, bias=bias)
        self.bn1 = norm(size.stem_channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(0)
        self.layer2 = stage(1)
        self.layer3 = stage(2)
        self.layer4 = stage(3) if len(size.blocks) == 4 else None
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(size.out_channels(len(size.blocks) - 1), num_classes)

        # Every convolution, a replaced stem's included, starts alike; the head keeps torch's own default, as in torchvision.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if zero_init_last_norm:
            # Each block starts as its shortcut alone: Goyal et al., https://arxiv.org/abs/1706.02677, section 5.1.
            for module in self.modules():
                if isinstance(module, Bottleneck):
                    nn.init.zeros_(module.bn3.weight)
                elif isinstance(module, BasicBlock):
                    nn.init.zeros_(module.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, num_classes] of images [batch, in_channels, height, width]."""
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)

        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        if self.layer4 is not None:
            x = self.layer4(x)

        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)


class ToyModel(nn.Module):
    """Two small convolutions with max-pooling after each, and a linear head: for trying things out, as in Graphcore's TensorFlow 2 CNNs.

    Args:
        num_classes: outputs of the head.
        in_channels: channels of the images.
        image_size: side of the images in pixels, at least 27.
        norm: a batch norm after each pooling.

    Raises:
        ValueError: images that are too small.
    """

    def __init__(self, *, num_classes: int, in_channels: int, image_size: int, norm: bool, norm_momentum: float = 0.1) -> None:
        super().__init__()
        side = (image_size - 2) // 5 // 5
        if side < 1:
            raise ValueError(f"image_size={image_size} is too small for a toy model: it must be at least 27")
        self.conv2d_0 = nn.Conv2d(in_channels, 4, 3)
        self.bn_0 = nn.BatchNorm2d(4, momentum=norm_momentum) if norm else nn.Identity()
        self.conv2d_1 = nn.Conv2d(4, 8, 1)
        self.bn_1 = nn.BatchNorm2d(8, momentum=norm_momentum) if norm else nn.Identity()
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(8 * side * side, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, num_classes] of images [batch, in_channels, height, width]."""
        x = F.relu(self.conv2d_0(x))
        x = self.bn_0(F.max_pool2d(x, 5))

        x = F.relu(self.conv2d_1(x))
        x = self.bn_1(F.max_pool2d(x, 5))

        return self.fc(self.flatten(x))


def resnet(
    size: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    stem: str = "cifar",
    norm: str = "batch",
    norm_groups: int | None = None,
    norm_momentum: float | None = None,
    shortcut_type: str | None = None,
    zero_init_last_norm: bool = False,
) -> ResNet:
    """Build a ResNet or ResNeXt.

    Args:
        size: one of `SIZES`: the number of layers, an "x" before it for ResNeXt 32x4d. Every size takes either stem.
        num_classes: outputs of the linear head.
        in_channels: channels of the images.
        stem: "cifar" (3x3 convolution, stride 1, no pooling) or "imagenet" (7x7, stride 2, then 3x3 max-pooling, stride 2).
        norm: "batch", "group" or "none"; without norms the convolutions have biases.
        norm_groups: groups of every group norm, 16 if None; must divide the network's channels. Only for norm "group".
        norm_momentum: share of a micro-batch in the running statistics of batch norms, 0.1 if None. Only for norm "batch".
        shortcut_type: "A" (subsample and pad with zero channels) or "B" (1x1 convolution and norm) where a block changes the
            shape, or "C" (the latter around every block). None: A for the CIFAR sizes, B for the others.
        zero_init_last_norm: start the weight of each block's last norm at zero.

    Raises:
        ValueError: an unknown name, or values that do not go together.
    """
    _one_of("size", size, SIZES)
    _one_of("stem", stem, STEMS)
    _one_of("norm", norm, NORMS)
    for name, count in (("num_classes", num_classes), ("in_channels", in_channels)):
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")
    row = _TABLE[size]

    if shortcut_type is None:
        shortcut_type = "A" if len(row.blocks) == 3 else "B"
    _one_of("shortcut_type", shortcut_type, SHORTCUT_TYPES)

    if norm == "none" and zero_init_last_norm:
        raise ValueError("zero_init_last_norm=True needs norms: norm='none' has none")
    if norm != "group" and norm_groups is not None:
        raise ValueError(f"norm_groups={norm_groups} belongs to norm='group', not to norm={norm!r}")
    if norm_momentum is not None and norm != "batch":
        raise ValueError(f"norm_momentum={norm_momentum} belongs to norm='batch', not to norm={norm!r}")
    if norm == "batch":
        make_norm: MakeNorm = partial(nn.BatchNorm2d, momentum=0.1 if norm_momentum is None else norm_momentum)
    elif norm == "none":
        make_norm = nn.Identity
    else:
        groups = 16 if norm_groups is None else norm_groups
        narrowest = row.stem_channels
        if groups < 1 or narrowest % groups:
            raise ValueError(f"norm_groups={groups} must divide {narrowest}, the channels of size {size}'s narrowest norm")
        make_norm = partial(nn.GroupNorm, groups)
    return ResNet(
        row,
        num_classes=num_classes,
        in_channels=in_channels,
        stem=stem,
        shortcut_type=shortcut_type,
        norm=make_norm,
        bias=norm == "none",
        zero_init_last_norm=zero_init_last_norm,
    )


def _one_of(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{name}={value!r} is unknown: choose from {', '.join(legal)}")
