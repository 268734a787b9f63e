"""The Lightning module that trains one of the CIFAR networks; it runs under any Trainer and strategy."""

from typing import Any, Literal

from cifar_ipu.networks import NETWORKS, WhiteningConv2d
from lightning_ipu.errors import UserError, as_user_errors
from lightning_ipu.recipe.classifier import ImageClassifier

PATCHES_FROM = 5_000  # training images whose patches are whitened


class CIFARModule(ImageClassifier):
    """Classifier of small images trained on the cross-entropy; logs train_, val_ and test_ loss and accuracy (0 to 1).

    Args:
        network: keras (the example of Keras), estimator (with a third convolution in its first block) or whitened (quick to train).
        num_classes: classes of the data set.
        in_channels: channels of the images.
        image_size: side of the images in pixels.
        **training: optimizer, schedule and the rest; see ``ImageClassifier``.

    Raises:
        UserError: an option is unknown, out of range, or means nothing beside another one.
    """

    def __init__(
        self,
        *,
        network: Literal["keras", "estimator", "whitened"] = "keras",
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        **training: Any,
    ) -> None:
        super().__init__(**training)
        if network not in NETWORKS:
            raise UserError(f"network={network!r} is unknown: choose from {', '.join(NETWORKS)}")
        with as_user_errors():
            built = NETWORKS[network](num_classes=num_classes, in_channels=in_channels, image_size=image_size)
        self.use(built)

    def setup(self, stage: str) -> None:
        """Before training, fit a whitening convolution to training images, unless loaded weights already contain a fitted one."""
        super().setup(stage)
        layers = [layer for layer in self.network if isinstance(layer, WhiteningConv2d) and not layer.fitted]
        if stage != "fit" or not layers:
            return
        sample = getattr(self.trainer.datamodule, "sample_images", None)
        if sample is None:
            raise UserError("network='whitened' needs a data module with sample_images(count), such as ImageDataModule")
        for layer in layers:
            layer.fit(sample(PATCHES_FROM))
