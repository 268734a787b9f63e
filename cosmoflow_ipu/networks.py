"""The networks of CosmoFlow in plain torch: a volume of particle counts goes in, four numbers of the universe come out.

`cosmoflow` is the form that Graphcore trained (kernel 2, 16 to 256 channels), `cosmoflow-mlperf` that of MLPerf HPC (kernel 3, 32 to
512), `cosmoflow-v1` that of MLPerf HPC 0.7, `resnet` MLPerf's three-dimensional bottleneck network. All are TensorFlow networks by origin
and keep its habits where they change numbers: LeakyReLU's slope of 0.3, Glorot initialisation, flattening in the order depth, height, width,
channel, SAME padding that puts the odd voxel at the end. The resnet's norms stand on the channel axis (there, on the last spatial one).

https://github.com/mlcommons/hpc/tree/main/cosmoflow, https://arxiv.org/abs/1808.04728
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NETWORKS = ("cosmoflow", "cosmoflow-mlperf", "cosmoflow-v1", "resnet")
LEAK = 0.3  # of LeakyReLU, Keras' default; torch's is 0.01
OUTPUT_SCALE = 1.2  # targets reach from -1 to 1, where tanh is flat

# By the names of Keras' layers, which the original program's option takes; all rise monotonically.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "LeakyReLU": lambda: nn.LeakyReLU(LEAK),
    "ReLU": nn.ReLU,
    "ELU": nn.ELU,
    "SELU": nn.SELU,
    "Softplus": nn.Softplus,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
}


class SameConv3d(nn.Conv3d):
    """Stride-1 convolution that keeps the volume's size for even kernels too: the odd voxel of zeros stands after it, as in TensorFlow."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        before = (kernel_size - 1) // 2
        super().__init__(in_channels, out_channels, kernel_size, padding=before)
        self.extra = (kernel_size - 1) - 2 * before

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, self.extra) * 3) if self.extra else x)


class Flatten(nn.Module):
    """Flatten [batch, channel, depth, height, width] with channels last, the order in which TensorFlow's dense weights count."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 4, 1).flatten(1)


class ScaledTanh(nn.Module):
    """1.2 tanh(x): every target from -1 to 1 is reached at a finite x."""

    def forward(self, x: Tensor) -> Tensor:
        return OUTPUT_SCALE * torch.tanh(x)


class CosmoFlow(nn.Module):
    """Blocks of convolution, max-pooling and activation, then three dense layers; `network` builds it and explains the options.

    The originals pool after the activation. All activations here rise monotonically, so the maximum may be taken first: the
    same numbers from an eighth of the work.
    """

    def __init__(
        self,
        *,
        input_size: int,
        in_channels: int,
        targets: int,
        channels: list[int],
        kernel_size: int,
        same: bool,
        fc1_size: int,
        fc2_size: int,
        hidden_activation: str,
        dropout: float,
        dropout_before_fc1: bool,
    ) -> None:
        super().__init__()
        activation = ACTIVATIONS[hidden_activation]
        blocks, size = [], input_size
        for before, after in zip([in_channels, *channels], channels, strict=False):
            convolution = SameConv3d(before, after, kernel_size) if same else nn.Conv3d(before, after, kernel_size)
            blocks.append(nn.Sequential(convolution, nn.MaxPool3d(2), activation()))
            size = (size if same else size - kernel_size + 1) // 2
            if size < 1:
                raise ValueError(f"input_size={input_size} leaves no voxel after {len(blocks)} of {len(channels)} convolution layers")
        self.features = nn.Sequential(*blocks)
        self.flatten = Flatten()
        self.dropout0 = nn.Dropout(dropout) if dropout_before_fc1 else nn.Identity()
        self.fc1 = nn.Linear(size**3 * channels[-1], fc1_size)
        self.activation1, self.dropout1 = activation(), nn.Dropout(dropout)
        self.fc2 = nn.Linear(fc1_size, fc2_size)
        self.activation2, self.dropout2 = activation(), nn.Dropout(dropout)
        self.fc3 = nn.Linear(fc2_size, targets)
        self.output = ScaledTanh()
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Targets [batch, targets] of volumes [batch, in_channels, input_size, input_size, input_size]."""
        x = self.features(x)
        x = self.dropout0(self.flatten(x))

        x = self.dropout1(self.activation1(self.fc1(x)))
        x = self.dropout2(self.activation2(self.fc2(x)))

        return self.output(self.fc3(x))


class Bottleneck3d(nn.Module):
    """1x1x1, 3x3x3 and 1x1x1 convolutions beside a shortcut; the stride stands on the first, as in Keras' ResNet."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, *, stride: int, projection: bool) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1, self.bn1 = nn.Conv3d(in_channels, width, 1, stride=stride), _norm(width)
        self.conv2, self.bn2 = nn.Conv3d(width, width, 3, padding=1), _norm(width)
        self.conv3, self.bn3 = nn.Conv3d(width, out_channels, 1), _norm(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv3d(in_channels, out_channels, 1, stride=stride), _norm(out_channels)) if projection else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.shortcut is None else self.shortcut(x)

        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))

        out += identity
        return self.relu(out)


class CosmoResNet(nn.Module):
    """Stem, four stages of two bottleneck blocks with 32, 64, 128 and 256 channels inside, global average, one dense layer."""

    def __init__(self, *, in_channels: int, targets: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv3d(in_channels, 64, 7, stride=2, padding=3), _norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool3d(3, stride=2, padding=1)
        stages, channels = [], 64
        for number, width in enumerate((32, 64, 128, 256)):
            stride = 1 if number == 0 else 2
            first = Bottleneck3d(channels, width, stride=stride, projection=True)
            channels = width * Bottleneck3d.expansion
            stages.append(nn.Sequential(first, Bottleneck3d(channels, width, stride=1, projection=False)))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        self.fc = nn.Linear(channels, targets)
        self.output = ScaledTanh()
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Targets [batch, targets] of volumes [batch, in_channels, size, size, size]."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.maxpool(x)

        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)

        x = self.avgpool(x).flatten(1)
        return self.output(self.fc(x))


def _norm(channels: int) -> nn.BatchNorm3d:
    return nn.BatchNorm3d(channels, eps=1.001e-5, momentum=0.01)  # Keras' ResNet; its momentum of 0.99 is the share that stays


def _initialise(network: nn.Module) -> None:
    """Keras' defaults: Glorot-uniform weights (https://proceedings.mlr.press/v9/glorot10a.html), zero biases."""
    for module in network.modules():
        if isinstance(module, (nn.Conv3d, nn.Linear)):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


def cosmoflow(
    name: str,
    *,
    input_size: int,
    in_channels: int = 4,
    targets: int = 4,
    conv_size: int | None = None,
    n_conv_layers: int | None = None,
    fc1_size: int | None = None,
    fc2_size: int | None = None,
    hidden_activation: str | None = None,
    dropout: float | None = None,
) -> nn.Module:
    """Build one of CosmoFlow's networks.

    Args:
        name: one of `NETWORKS`.
        input_size: voxels along each side of the volume, 32 to 128.
        in_channels: channels of the volume, 1 to 4: its redshifts.
        targets: numbers to predict.
        conv_size: channels of the first convolution, doubled by each further one (`cosmoflow-v1`: the same in all); null is 16, for
            `cosmoflow-mlperf` 32.
        n_conv_layers: null is 5, for `cosmoflow-mlperf` as many as leave 4 voxels a side: 5, 4, 3 for volumes of 128, 64, 32.
        fc1_size, fc2_size: outputs of the first two dense layers; null is 128 and 64.
        hidden_activation: one of `ACTIVATIONS`; null is LeakyReLU.
        dropout: share of the dense layers' outputs that is dropped in training; null is 0.

    Raises:
        ValueError: an unknown name, a number out of range, or an option that the network does not have.
    """
    given = {
        "conv_size": conv_size,
        "n_conv_layers": n_conv_layers,
        "fc1_size": fc1_size,
        "fc2_size": fc2_size,
        "hidden_activation": hidden_activation,
        "dropout": dropout,
    }
    if name not in NETWORKS:
        raise ValueError(f"network={name!r} is unknown: choose from {', '.join(NETWORKS)}")
    if not 32 <= input_size <= 128:
        raise ValueError(f"input_size={input_size} must lie between 32 and 128 voxels")
    if not 1 <= in_channels <= 4:
        raise ValueError(f"in_channels={in_channels} must lie between 1 and 4")
    if name == "resnet":
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"{option}={value} means nothing to network='resnet', which has no such option")
        return CosmoResNet(in_channels=in_channels, targets=targets)

    for option in ("conv_size", "n_conv_layers", "fc1_size", "fc2_size"):
        if given[option] is not None and given[option] < 1:
            raise ValueError(f"{option}={given[option]} must be at least 1")
    if hidden_activation not in (None, *ACTIVATIONS):
        raise ValueError(f"hidden_activation={hidden_activation!r} is unknown: choose from {', '.join(ACTIVATIONS)}")
    if dropout is not None and not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be at least 0 and below 1")
    mlperf, v1 = name == "cosmoflow-mlperf", name == "cosmoflow-v1"
    first = conv_size or (32 if mlperf else 16)
    layers = n_conv_layers or ((input_size // 4).bit_length() - 1 if mlperf else 5)
    return CosmoFlow(
        input_size=input_size,
        in_channels=in_channels,
        targets=targets,
        channels=[first if v1 else first << layer for layer in range(layers)],
        kernel_size=3 if mlperf else 2,
        same=not v1,
        fc1_size=fc1_size or 128,
        fc2_size=fc2_size or 64,
        hidden_activation=hidden_activation or "LeakyReLU",
        dropout=dropout or 0.0,
        dropout_before_fc1=v1,
    )
