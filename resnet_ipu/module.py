"""The Lightning module that trains a ResNet or ResNeXt classifier; it runs under any Trainer and strategy."""

from typing import Any, Literal

from lightning_ipu.classifier import ImageClassifier
from resnet_ipu.networks import resnet


class ResNetModule(ImageClassifier):
    """Image classifier trained on the cross-entropy; logs train_, val_ and test_ loss and accuracy (0 to 1).

    Args:
        size: number of layers: 8, 14, 20, 32, 44, 56, 110 (CIFAR), 18, 34, 50, 101, 152 (ImageNet), x50, x101 (ResNeXt 32x4d).
        num_classes: classes of the data set.
        in_channels: channels of the images.
        image_size: side of the images in pixels; chooses the stem where none is given.
        stem: cifar (3x3, stride 1, no pooling) or imagenet (7x7, stride 2, max-pooling); null is cifar up to 64 pixels.
        norm_type: batch, group or none.
        norm_groups: groups of each group norm; null is 16.
        shortcut_type: A (zero-padded) or B (1x1 convolution) where the shape changes, C (1x1 convolution everywhere); null is A
            for the CIFAR sizes and B for the others.
        zero_init_last_norm: start every block as its shortcut alone; null is true where there are norms.
        **training: optimizer, schedule and the rest; see ``ImageClassifier``.

    Raises:
        ValueError: an option is unknown, out of range, or means nothing beside another one.
    """

    def __init__(
        self,
        *,
        size: str | int = "20",
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        stem: Literal["cifar", "imagenet"] | None = None,
        norm_type: Literal["batch", "group", "none"] = "batch",
        norm_groups: int | None = None,
        shortcut_type: Literal["A", "B", "C"] | None = None,
        zero_init_last_norm: bool | None = None,
        **training: Any,
    ) -> None:
        super().__init__(**training)
        if image_size < 1:
            raise ValueError(f"image_size={image_size} must be at least 1 pixel")
        if stem is None:
            stem = "cifar" if image_size <= 64 else "imagenet"
        if zero_init_last_norm is None:
            zero_init_last_norm = norm_type != "none"
        self.use(
            resnet(
                str(size),  # YAML reads 20 as a number
                num_classes=num_classes,
                in_channels=in_channels,
                stem=stem,
                norm=norm_type,
                norm_groups=norm_groups,
                shortcut_type=shortcut_type,
                zero_init_last_norm=zero_init_last_norm,
            )
        )
