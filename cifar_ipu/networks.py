"""Small convolutional networks for small images, in plain torch: each is one flat list of named layers, any of which can begin a stage.

``keras`` is the CIFAR-10 example that came with Keras, ``estimator`` the same with a further convolution before its first pooling.
``whitened`` gets more out of a minute of computing. It follows the speed runs on CIFAR-10 that D. Page's "How to train your ResNet"
(2018) began and K. Jordan's https://arxiv.org/abs/2404.00498 sums up: a first convolution that whitens patches of the images and is not
trained, three groups of convolutions, each pooled early, maximum over what is left, and a scaled linear head.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# -- the two original networks ----------------------------------------------------------------------------------------------------


def keras_cnn(*, num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Sequential:
    """18 layers, logits last: two blocks of two 3x3 convolutions, of which the second is not padded, and two dense layers.

    1,250,858 parameters for 10 classes of 3 x 32 x 32 pixels. Weights start as Keras draws them (Glorot and Bengio, 2010: uniform with
    variance 2 / (inputs + outputs)), biases at 0.

    Raises:
        ValueError: the images are too small for the two poolings.
    """
    return _original(num_classes=num_classes, in_channels=in_channels, image_size=image_size, extra=False)


def estimator_cnn(*, num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Sequential:
    """``keras_cnn`` with a third convolution in the first block, which no activation follows; 1,260,106 parameters."""
    return _original(num_classes=num_classes, in_channels=in_channels, image_size=image_size, extra=True)


def _original(*, num_classes: int, in_channels: int, image_size: int, extra: bool) -> nn.Sequential:
    pooled = (image_size - (4 if extra else 2)) // 2
    side = (pooled - 2) // 2
    if side < 1:
        raise ValueError(f"image_size={image_size} leaves nothing after two poolings; at least {12 if extra else 10} pixels are needed")
    layers = OrderedDict(conv1=nn.Conv2d(in_channels, 32, 3, padding=1), relu1=nn.ReLU(), conv2=nn.Conv2d(32, 32, 3), relu2=nn.ReLU())
    if extra:
        layers["conv2b"] = nn.Conv2d(32, 32, 3)
    layers |= OrderedDict(pool1=nn.MaxPool2d(2), dropout1=nn.Dropout(0.25))
    layers |= OrderedDict(conv3=nn.Conv2d(32, 64, 3, padding=1), relu3=nn.ReLU(), conv4=nn.Conv2d(64, 64, 3), relu4=nn.ReLU())
    layers |= OrderedDict(pool2=nn.MaxPool2d(2), dropout2=nn.Dropout(0.25), flatten=nn.Flatten())
    layers |= OrderedDict(dense1=nn.Linear(64 * side * side, 512), relu5=nn.ReLU(), dropout3=nn.Dropout(0.5))
    layers["dense2"] = nn.Linear(512, num_classes)
    for layer in layers.values():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(layers)


# -- a quick one ------------------------------------------------------------------------------------------------------------------


class WhiteningConv2d(nn.Conv2d):
    """Convolution whose filters are the principal directions of the images' patches, each twice with either sign, scaled to variance 1.

    ``fit`` takes them from images. Nothing here is trained, so that the backward pass, which would be dearest at full size, ends behind
    it. ``kernel_size`` pixels a side, no padding: 2 x in_channels x kernel_size squared channels come out.
    """

    def __init__(self, in_channels: int, kernel_size: int) -> None:
        super().__init__(in_channels, 2 * in_channels * kernel_size**2, kernel_size, bias=False)
        self.weight.requires_grad = False

    @property
    def fitted(self) -> bool:
        """Whether `fit` has set the filters, here or in the run whose weights were loaded: they come in pairs of either sign."""
        positive, negative = self.weight.chunk(2)
        return torch.equal(positive, -negative)

    @torch.no_grad()
    def fit(self, images: Tensor, *, eps: float = 5e-4) -> None:
        """Set the filters from normalised images [batch, channels, height, width].

        A filter is v / sqrt(λ + eps), for the eigenvalues λ and eigenvectors v of the covariance of all patches; eps keeps directions
        that hardly occur from becoming noise. The sign of v is settled by its largest entry, so that it does not depend on the machine.
        """
        patches = F.unfold(images.double(), self.kernel_size).transpose(1, 2).flatten(0, 1)
        values, vectors = torch.linalg.eigh(patches.T.cov())
        vectors = vectors.T.flip(0)  # rows, the largest eigenvalue first
        signs = vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign()
        filters = vectors * signs / (values.flip(0).clamp(min=0) + eps).sqrt().unsqueeze(1)
        self.weight.copy_(torch.cat([filters, -filters]).view_as(self.weight))


class ConvGroup(nn.Module):
    """3x3 convolution pooled at once, then ``depth - 1`` more; from the second on they stand beside a shortcut.

    Height and width are halved, rounded down.
    """

    def __init__(self, in_channels: int, out_channels: int, *, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.rest = nn.ModuleList(
            nn.Sequential(nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels), nn.GELU())
            for _ in range(depth - 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))

        for layer in self.rest:
            x = x + layer(x)
        return x


class Scale(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor:g}"


def whitened_cnn(
    *, num_classes: int = 10, in_channels: int = 3, image_size: int = 32, widths: tuple[int, int, int] = (32, 128, 256), depth: int = 2
) -> nn.Sequential:
    """Whitening, three groups of ``depth`` convolutions with ``widths`` channels, maximum over the image, linear head.

    The whitening convolution sees 3 x 3 pixels of grey images and 2 x 2 of colour ones; call ``network.whiten.fit`` before training.

    Raises:
        ValueError: the images are too small for the three poolings.
    """
    kernel = 3 if in_channels == 1 else 2
    if (image_size - kernel + 1) // 8 < 1:
        raise ValueError(f"image_size={image_size} leaves nothing after three poolings; at least {kernel + 7} pixels are needed")
    whiten = WhiteningConv2d(in_channels, kernel)
    first, second, third = widths
    head = nn.Linear(third, num_classes, bias=False)
    return nn.Sequential(
        OrderedDict(
            whiten=whiten,
            gelu=nn.GELU(),
            group1=ConvGroup(whiten.out_channels, first, depth=depth),
            group2=ConvGroup(first, second, depth=depth),
            group3=ConvGroup(second, third, depth=depth),
            pool=nn.AdaptiveMaxPool2d(1),
            flatten=nn.Flatten(),
            head=head,
            scale=Scale(1 / 8),
        )
    )


NETWORKS: dict[str, Callable[..., nn.Sequential]] = {"keras": keras_cnn, "estimator": estimator_cnn, "whitened": whitened_cnn}
