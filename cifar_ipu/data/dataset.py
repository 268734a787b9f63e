"""Images held whole in memory, with random crops and flips of a whole micro-batch at once.

The offsets are a pure function of (seed, epoch, sample index): no composition of a batch, number of loader workers or of replicas changes an image.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cifar_ipu.augment import ImageAugmentation
from cifar_ipu.data.words import random_words

PADDING = 4  # pixels of zero border around an image before its random crop, where nothing else is said


def random_crop_and_flip(images: Tensor, words: np.ndarray, *, flip: bool, padding: int = PADDING) -> Tensor:
    """Shift every image of a micro-batch by up to `padding` pixels each way and mirror half of them.

    images: (B, C, H, W) uint8, raw pixels: the border that a shift brings in is black (0), as it would not be after normalisation.
    words: (B,) uint64, 64 random bits for each image: bits 0-23 choose the row, 24-47 the column of the crop, bit 63 the mirror.
    Returns (B, C, H, W) uint8 in channels_last order.
    """
    pixels = images.permute(0, 2, 3, 1).numpy()
    batch, height, width, channels = pixels.shape
    padded = np.zeros((batch, height + 2 * padding, width + 2 * padding, channels), dtype=np.uint8)
    padded[:, padding : padding + height, padding : padding + width] = pixels
    positions = np.uint64(2 * padding + 1)
    rows, columns = (((words >> np.uint64(shift)) & np.uint64(0xFFFFFF)) * positions >> np.uint64(24) for shift in (0, 24))
    # All crops of all images as a view; indexing it copies, for each image, the one that was drawn.
    per_image, per_row, per_column, per_channel = padded.strides
    windows = np.lib.stride_tricks.as_strided(
        padded,
        (batch, 2 * padding + 1, 2 * padding + 1, height, width, channels),
        (per_image, per_row, per_column, per_row, per_column, per_channel),
        writeable=False,
    )
    cropped = windows[np.arange(batch), rows.astype(np.intp), columns.astype(np.intp)]
    if flip:
        mirrored = np.flatnonzero(words >> np.uint64(63))
        as_planes = torch.from_numpy(cropped[mirrored]).permute(0, 3, 1, 2)  # the form that torch.flip is vectorised for
        cropped[mirrored] = as_planes.flip(3).permute(0, 2, 3, 1).numpy()
    return torch.from_numpy(cropped).permute(0, 3, 1, 2)


class ImageDataset(Dataset):
    """Rows of one uint8 image tensor, with random crops and flips if asked for.

    `__getitem__` draws from torch's global random stream, as any data set does; `seeded_batch` collates a whole micro-batch, whose
    randomness is a pure function of (seed, epoch, index).
    """

    def __init__(
        self,
        *,
        images: Tensor,
        labels: Tensor,
        rows: np.ndarray,
        augment: bool,
        flip: bool,
        padding: int = PADDING,
        augmentation: ImageAugmentation | None = None,
    ) -> None:
        self.images = images  # (N, C, H, W) uint8, channels_last; shared by the training and the validation part
        self.labels = labels  # (N,) int64
        self.rows = torch.from_numpy(rows)  # this data set's sample i is row rows[i]
        self.augment = augment
        self.flip = flip
        self.padding = padding
        self.augmentation = augmentation  # of single images, after crop and flip

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image (C, H, W) uint8 and its label (int64, no dimensions)."""
        row = self.rows[index]
        image = self.images[row]
        if self.augment:
            word = torch.randint(-(1 << 63), (1 << 63) - 1, (1,)).numpy().view(np.uint64)
            image = random_crop_and_flip(image.unsqueeze(0), word, flip=self.flip, padding=self.padding)[0]
            if self.augmentation:
                image = self.augmentation(image, seed=int(torch.randint(1 << 62, ())), epoch=0, index=int(index))
        return image, self.labels[row]

    def seeded_batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) uint8 and labels (B,) int64 of the samples `indices`."""
        indices = np.asarray(indices, dtype=np.int64)
        rows = self.rows.numpy()[indices]
        # numpy copies whole images where torch's indexing kernel goes element by element
        images = torch.from_numpy(self.images.permute(0, 2, 3, 1).numpy()[rows]).permute(0, 3, 1, 2)
        if self.augment:
            words = random_words(seed, epoch, indices=indices)
            images = random_crop_and_flip(images, words, flip=self.flip, padding=self.padding)
            if self.augmentation:
                augmented = (
                    self.augmentation(image, seed=seed, epoch=epoch, index=index)
                    for image, index in zip(images, indices.tolist(), strict=True)
                )
                images = torch.stack(list(augmented)).contiguous(memory_format=torch.channels_last)
        return images, self.labels[torch.from_numpy(rows)]
