"""Augmentation of single images beyond crops and flips: torchvision's transforms, drawn from (seed, epoch, sample index)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from lightning_ipu.errors import UserError
from lightning_ipu.randomness import mix, name_word, seed_torch

_AUGMENT = name_word("augment")


class ImageAugmentation:
    """What is done to an image of the training set after crop and flip: automatic augmentation, colour jitter, random erasing, in this order.

    Args:
        auto_augment: "randaugment" (two random operations of one magnitude, https://arxiv.org/abs/1909.13719) or "trivialaugment" (one
            random operation of random magnitude, https://arxiv.org/abs/2103.10158, its wide space); None for neither.
        magnitude: of randaugment, 0 to 30; None is 9.
        color_jitter: brightness, contrast and saturation are multiplied by a factor between 1 - x and 1 + x each, in random order.
        random_erasing: probability that a rectangle of 2 to 33 % of the image is filled (https://arxiv.org/abs/1708.04896).
        fill: what with: a value from 0 to 1 for each channel, the images' mean colour.
        auto_augment_fill: fills the empty areas where auto_augment shifts or rotates the image, "mean" (colour) or "black"; None is mean.

    Raises:
        UserError: an option is unknown, out of range, or means nothing beside another one.
    """

    def __init__(
        self,
        *,
        auto_augment: Literal["randaugment", "trivialaugment"] | None = None,
        magnitude: int | None = None,
        color_jitter: float | None = None,
        random_erasing: float | None = None,
        fill: Sequence[float],
        auto_augment_fill: Literal["mean", "black"] | None = None,
    ) -> None:
        if auto_augment not in (None, "randaugment", "trivialaugment"):
            raise UserError(f"auto_augment={auto_augment!r} is unknown: choose from randaugment, trivialaugment")
        if magnitude is not None and (auto_augment != "randaugment" or not 0 <= magnitude <= 30):
            raise UserError(f"randaugment_magnitude={magnitude} must lie between 0 and 30, and needs auto_augment='randaugment'")
        if color_jitter is not None and not 0 < color_jitter <= 1:
            raise UserError(f"color_jitter={color_jitter} must be above 0 and at most 1")
        if random_erasing is not None and not 0 < random_erasing <= 1:
            raise UserError(f"random_erasing={random_erasing} is a probability: it must be above 0 and at most 1")
        if auto_augment_fill is not None and (auto_augment is None or auto_augment_fill not in ("mean", "black")):
            raise UserError(f"auto_augment_fill={auto_augment_fill!r} must be mean or black, and needs auto_augment")
        colour = [round(255 * value) for value in fill]
        moved_in = [0] * len(colour) if auto_augment_fill == "black" else colour
        options = {"interpolation": InterpolationMode.BILINEAR, "fill": moved_in}
        self._transforms: list[v2.Transform] = []
        if auto_augment == "randaugment":
            self._transforms.append(v2.RandAugment(magnitude=9 if magnitude is None else magnitude, **options))
        elif auto_augment == "trivialaugment":
            self._transforms.append(v2.TrivialAugmentWide(**options))
        if color_jitter is not None:
            self._transforms.append(v2.ColorJitter(brightness=color_jitter, contrast=color_jitter, saturation=color_jitter))
        if random_erasing is not None:
            self._transforms.append(v2.RandomErasing(random_erasing, value=colour))

    def __bool__(self) -> bool:
        return bool(self._transforms)

    def __call__(self, image: Tensor, *, seed: int, epoch: int, index: int) -> Tensor:
        """An augmented copy of an image (C, H, W) uint8: a function of its arguments alone; the global random streams stay as they were."""
        before = torch.default_generator.get_state()  # torchvision draws from torch's stream alone
        seed_torch(mix(seed, _AUGMENT, epoch, index))
        try:
            for transform in self._transforms:
                image = transform(image)
        finally:
            torch.default_generator.set_state(before)
        return image
