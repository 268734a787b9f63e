"""Images made up in the shape of a data set, on the host or on the device that trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cifar_ipu.data.words import LABELS, NOISE, OFFSETS, PATTERNS, random_words


class Synthesis:
    """Makes images out of hashed bits: the same ones on every device, in any order, with nothing stored per image.

    "pattern": image = its class's 4 x 4 mosaic of random colours + noise, both uniform over 0..127; a network learns to tell the classes.
    "noise": plain noise over 0..255 and random labels, with nothing to learn.
    An image's noise is a window, at a hashed offset, into one bank of noise, so that making a micro-batch costs one gather.
    """

    _OFFSETS_IN_BANK = 1 << 24

    def __init__(self, *, kind: Literal["pattern", "noise"], classes: int, channels: int, image_size: int, seed: int) -> None:
        self.kind = kind
        self.classes = classes
        self.channels = channels
        self.image_size = image_size
        self.seed = seed
        levels = 128 if kind == "pattern" else 256
        variance = (levels**2 - 1) / 12 * (2 if kind == "pattern" else 1)  # of uniform integers; a pattern adds two of them
        self.mean = ((127.0 if kind == "pattern" else 127.5) / 255,) * channels
        self.std = (variance**0.5 / 255,) * channels
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def labels(self, indices: np.ndarray) -> Tensor:
        """Labels (B,) int64: classes in turn for patterns, at random for noise."""
        drawn = indices if self.kind == "pattern" else random_words(self.seed, LABELS, indices=indices) >> np.uint64(1)
        return torch.from_numpy(np.asarray(drawn, dtype=np.int64) % self.classes)

    def offsets(self, indices: np.ndarray) -> Tensor:
        """Where in the bank of noise each image begins: (B,) int64."""
        words = random_words(self.seed, OFFSETS, indices=indices)
        return torch.from_numpy((words % np.uint64(self._OFFSETS_IN_BANK)).astype(np.int64))

    def images(self, offsets: Tensor, labels: Tensor) -> Tensor:
        """Images (B, C, H, W) uint8, channels_last, on the device on which `offsets` and `labels` (B,) lie."""
        mosaics, bank = self._tensors(offsets.device)
        size = self.image_size
        noise = bank.unfold(0, size * size * self.channels, 1)[offsets].view(-1, size, size, self.channels)
        if self.kind == "pattern":
            tiles = torch.arange(size, device=offsets.device) * 4 // size
            noise += mosaics[labels].index_select(1, tiles).index_select(2, tiles)
        return noise.permute(0, 3, 1, 2)

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Class mosaics (classes, 4, 4, C) and the bank of noise, both uint8; made once and kept on each device that asks."""
        if device not in self._on_device:

            def random_bytes(what: int, count: int) -> np.ndarray:
                return random_words(self.seed, what, indices=np.arange(-(-count // 8))).astype("<u8").view(np.uint8)[:count]

            shape = (self.classes, 4, 4, self.channels)
            mosaics = random_bytes(PATTERNS, int(np.prod(shape))).reshape(shape) & 127
            bank = random_bytes(NOISE, self._OFFSETS_IN_BANK + self.image_size**2 * self.channels)
            if self.kind == "pattern":
                bank = bank & 127
            self._on_device[device] = (torch.from_numpy(mosaics).to(device), torch.from_numpy(bank).to(device))
        return self._on_device[device]


class SyntheticDataset(Dataset):
    """Synthetic images, or (for `on_device`) the offsets from which the data module makes them once they are on the device."""

    def __init__(self, *, synthesis: Synthesis, rows: np.ndarray, on_device: bool) -> None:
        self.synthesis = synthesis
        self.rows = torch.from_numpy(rows)
        self.on_device = on_device

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image (C, H, W) uint8, or its offset into the bank of noise (int64, no dimensions), and its label."""
        images, labels = self.seeded_batch([index], seed=0, epoch=0)
        return images[0], labels[0]

    def seeded_batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) uint8 or offsets (B,) int64, and labels (B,) int64; an image is the same in every epoch."""
        rows = self.rows.numpy()[np.asarray(indices, dtype=np.int64)]
        labels, offsets = self.synthesis.labels(rows), self.synthesis.offsets(rows)
        return (offsets if self.on_device else self.synthesis.images(offsets, labels)), labels
