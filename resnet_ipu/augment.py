"""Augmentation of ImageNet training: of single images by the loader, and of a micro-batch's images among each other on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.transforms import v2

from cifar_ipu.augment import ImageAugmentation
from lightning_ipu.errors import UserError

__all__ = ["ImageAugmentation", "Mixing"]


class Mixing:
    """Mixes each image of a micro-batch with the one before it, and their labels in the same shares.

    mixup (https://arxiv.org/abs/1710.09412) adds the images in shares λ and 1 - λ; cutmix (https://arxiv.org/abs/1905.04899) puts a rectangle of
    the one, 1 - λ of its area, into the other. λ is drawn from Beta(α, α), once per micro-batch. With both, each micro-batch gets one of them by
    equal chance. All draws are from torch's global stream on the CPU: under IPUStrategy that is seeded from (seed, weight update,
    replica, micro-batch), so that the first and the last stage of a pipeline mix alike, wherever they are.

    Args:
        num_classes: of the labels.
        mixup: α of mixup; None for none.
        cutmix: α of cutmix; None for none.

    Raises:
        UserError: an α that is not above 0.
    """

    def __init__(self, *, num_classes: int, mixup: float | None = None, cutmix: float | None = None) -> None:
        self._kinds: list[v2.Transform] = []
        for name, alpha, kind in (("mixup", mixup, v2.MixUp), ("cutmix", cutmix, v2.CutMix)):
            if alpha is not None and not 0 < alpha < float("inf"):
                raise UserError(f"{name}={alpha} must be above 0: it is α of the Beta distribution that shares are drawn from")
            if alpha is not None:
                self._kinds.append(kind(alpha=alpha, num_classes=num_classes))

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mixed images (B, C, H, W) and, for labels (B,), the shares of the classes (B, num_classes) in each.

        Raises:
            UserError: there is one image only.
        """
        if len(images) < 2:
            raise UserError(
                "mixup and cutmix mix the images of a micro-batch with each other: a micro-batch of 1 has none; give at least 2"
            )
        which = int(torch.randint(len(self._kinds), ())) if len(self._kinds) > 1 else 0
        return self._kinds[which](images, labels)
