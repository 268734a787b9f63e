"""Cubes of counts with the parameters of their universes, turned and mirrored at random in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from cosmoflow_ipu.data.cache import CubeCache
from cosmoflow_ipu.data.files import CHANNELS, read_cube
from lightning_ipu.data.tfrecord import TFRecordError, TFRecords
from lightning_ipu.randomness import mix, name_word

_AUGMENT, _DUMMY = name_word("cube symmetry"), name_word("dummy cube")
Batch = tuple[Tensor, Tensor]  # counts [batch, channels, size, size, size] int16; targets [batch, 4] float32 from -1 to 1


class CubeDataset(Dataset):
    """Cubes of some records, with one of their 48 symmetries each where asked for.

    `__getitem__` draws from torch's global random stream, as any data set does; `seeded_batch` collates a whole micro-batch, whose
    randomness is a pure function of (seed, epoch, index).

    Args:
        records: the files' records.
        rows: which of them, in order.
        size: voxels along each side.
        channels: how many of the redshifts, the latest first.
        augment: turn and mirror each cube at random: a universe has no direction.
        cache: where cubes are kept once they were read; None without one.
    """

    def __init__(
        self, *, records: TFRecords, rows: np.ndarray, size: int, channels: int, augment: bool, cache: CubeCache | None = None
    ) -> None:
        self.records, self.rows, self.size, self.channels, self.augment, self.cache = records, rows, size, channels, augment, cache

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Counts (channels, size, size, size) int16 and targets (4,) float32."""
        counts, targets = self._read([index], lambda _: int(torch.randint(48, ())))
        return counts[0], targets[0]

    def seeded_batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> Batch | TFRecordError:
        """Counts (batch, channels, size, size, size) int16 and targets (batch, 4) float32 of the samples `indices`.

        In a loader's worker a bad record is returned, not raised: the data module raises it where it arrives as one line.
        """
        try:
            return self._read(indices, lambda index: mix(seed, _AUGMENT, epoch, index) % 48)
        except TFRecordError as error:
            if get_worker_info() is None:
                raise
            return error

    def _read(self, indices: Sequence[int], symmetry: Callable[[int], int]) -> Batch:
        shape = (self.size, self.size, self.size, CHANNELS)
        counts = np.empty((len(indices), *shape), dtype="<i2")
        targets = np.empty((len(indices), 4), dtype=np.float32)
        turned = np.empty(shape, dtype="<i2") if self.augment else None
        for place, index in enumerate(indices):
            cube = counts[place] if turned is None else turned
            into = cube.reshape(-1).view(np.uint8)
            found = None if self.cache is None else self.cache.get(index, into)
            if found is None:
                found = read_cube(self.records, int(self.rows[index]), into)
                if self.cache is not None:
                    self.cache.put(index, into, found)
            targets[place] = found
            if turned is not None:
                turn(turned, symmetry(index), into=counts[place])
        return torch.from_numpy(counts[..., : self.channels]).permute(0, 4, 1, 2, 3), torch.from_numpy(targets)


_ORDERS = ((0, 1, 2), (1, 2, 0), (2, 0, 1), (1, 0, 2), (0, 2, 1), (2, 1, 0))


def turn(cube: np.ndarray, symmetry: int, *, into: np.ndarray) -> None:
    """Write one of the 48 turned and mirrored forms of a cube (n, n, n, 4) int16, all channels alike; number 0 is the cube itself."""
    # A voxel's four counts are moved as one number of eight bytes.
    cube, into = cube.view(np.int64)[..., 0], into.view(np.int64)[..., 0]
    flips = tuple(slice(None, None, -1 if symmetry >> axis & 1 else 1) for axis in range(3))
    into[...] = cube.transpose(_ORDERS[symmetry >> 3])[flips]


class DummyDataset(Dataset):
    """One cube of random counts with one random target, over and over: loading costs nothing, and there is nothing to learn."""

    def __init__(self, *, samples: int, size: int, channels: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(mix(seed, _DUMMY))
        cube = torch.poisson(torch.ones(size, size, size, channels), generator=generator).to(torch.int16)
        self.samples, self.counts = samples, cube.permute(3, 0, 1, 2)
        self.targets = 2 * torch.rand(4, generator=generator) - 1

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.counts, self.targets

    def seeded_batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> Batch:
        return self.counts.expand(len(indices), -1, -1, -1, -1), self.targets.expand(len(indices), -1)
