"""Images of one size with their labels, read where they lie: uint8 until they are on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cifar_ipu.augment import ImageAugmentation
from lightning_ipu.data.tfrecord import TFRecordError
from lightning_ipu.randomness import mix, name_word
from resnet_ipu.imagenet.folders import FolderImages
from resnet_ipu.imagenet.images import MEAN, STD, UNIFORMS, ImageError, center_crop, half_scale_decoder, training_crop
from resnet_ipu.imagenet.shards import ShardImages

_CROP = name_word("crop")


class ImageDataset(Dataset):
    """Images of one size with their labels: random crops and mirrored ones in training, the middle in evaluation.

    `__getitem__` draws from torch's global random stream, as any data set does; `seeded_batch` collates a whole micro-batch, whose
    randomness is a function of (seed, epoch, index).

    Args:
        source: the encoded images.
        rows: numbers of those to use.
        size: side in pixels of the images that come out.
        random: whether to crop at random, as in training.
        resize: pixels to which evaluation scales the shorter side first.
        augmentation: what is done to an image after crop and mirroring, in training.
        fast: decode large parts of JPEGs at half scale; see `training_crop`. Raises UserError where simplejpeg is not installed.
        eight_bit: give images out as they are, uint8; otherwise normalised, float32.
    """

    def __init__(
        self,
        source: FolderImages | ShardImages,
        *,
        rows: np.ndarray,
        size: int,
        resize: int,
        random: bool = False,
        augmentation: ImageAugmentation | None = None,
        fast: bool = False,
        eight_bit: bool = True,
    ) -> None:
        self.source, self.rows, self.size, self.resize = source, rows, size, resize
        self.random, self.augmentation, self.eight_bit = random, augmentation, eight_bit
        self._decode_half = half_scale_decoder() if fast else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image (3, size, size) and its label (int64, no dimensions); raises ImageError, TFRecordError or OSError."""
        word = int(torch.randint(1 << 62, (1,))) if self.random else 0
        images, labels = self._batch([index], seed=word, epoch=0)
        return images[0], labels[0]

    def seeded_batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> Any:
        """Images (B, 3, size, size) in channels_last order and labels (B,) int64; what is wrong with one of them in their place.

        An exception that a loader's worker raises would come with the worker's traceback; the data module raises the one returned here.
        """
        try:
            return self._batch(indices, seed=seed, epoch=epoch)
        except (ImageError, TFRecordError, OSError) as error:
            return error

    def _batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        pixels = torch.empty(len(indices), self.size, self.size, 3, dtype=torch.uint8)
        images, labels = pixels.permute(0, 3, 1, 2), torch.empty(len(indices), dtype=torch.int64)
        for place, index in enumerate(indices):
            row = int(self.rows[index])
            data, labels[place] = self.source.read(row)
            try:
                images[place] = self._view(data, seed=seed, epoch=epoch, index=index)
            except ValueError as error:
                raise ImageError(self.source.name(row), str(error)) from None
        return (images if self.eight_bit else normalised(images)), labels

    def _view(self, data: np.ndarray, *, seed: int, epoch: int, index: int) -> Tensor:
        if not self.random:
            return center_crop(data, size=self.size, resize=self.resize)
        generator = torch.Generator().manual_seed(mix(seed, _CROP, epoch, index))
        uniforms = torch.rand(UNIFORMS, generator=generator, dtype=torch.float64).tolist()
        image = training_crop(data, size=self.size, uniforms=uniforms, decode_half=self._decode_half)
        return self.augmentation(image, seed=seed, epoch=epoch, index=index) if self.augmentation else image


@cache
def _scale_and_shift(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (MEAN, STD))
    return 1 / (255 * std), -mean / std


def normalised(images: Tensor) -> Tensor:
    """uint8 images (B, 3, H, W) as float32 with ImageNet's mean 0 and deviation 1, in channels_last order."""
    scale, shift = _scale_and_shift(images.device)
    return images.to(torch.float32, memory_format=torch.channels_last).mul_(scale).add_(shift)
