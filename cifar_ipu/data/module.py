"""The data module of CIFAR-10, CIFAR-100, MNIST, Fashion-MNIST and the sample, each held whole in memory as one uint8 tensor."""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cifar_ipu.augment import ImageAugmentation
from cifar_ipu.data.dataset import PADDING, ImageDataset
from cifar_ipu.data.download import available_data_set, fetch
from cifar_ipu.data.facts import DATA_SETS, known_data_set
from cifar_ipu.data.files import load_images
from cifar_ipu.data.synthetic import Synthesis, SyntheticDataset
from cifar_ipu.data.words import SPLIT, random_words
from lightning_ipu import machine
from lightning_ipu.data.fingerprint import fingerprint
from lightning_ipu.errors import UserError


class ImageDataModule(pl.LightningDataModule):
    """Training, validation and test images of a small-image data set, normalised on the device.

    The test set is not the validation set unless asked for: by default a tenth of the training images, drawn class by class from `seed`,
    is held out for validation. The embedded sample has 500 validation images of its own, which serve as its test set too.
    What a model needs to know (`num_classes`, `in_channels`, `image_size`) is known from construction on; images are read in `setup`.

    Args:
        dataset: CIFAR-10, CIFAR-100 (fine labels), MNIST, FASHION-MNIST, or SAMPLE for the 2,000 + 500 Fashion-MNIST images in this
            package. None is CIFAR-10 if it is in `data_dir`, else SAMPLE with a warning; `available_data_set` tries to download it.
        data_dir: Folder with the data set's files, as distributed or unpacked; where missing ones are downloaded to.
        micro_batch_size: Images in a training batch of the loader.
        eval_batch_size: Images in a validation, test or prediction batch; None is `micro_batch_size`.
        num_workers: Processes that load training and evaluation data; with the data set in memory 0 is usually the fastest.
        augment: Random crops from a black border and, MNIST's digits excepted, horizontal flips of training images.
            None is on for real images and off for synthetic ones, which cannot be augmented.
        crop_padding: Width of that border in pixels; 0 leaves the flips alone.
        scaling: "standard" brings the pixels of each channel to mean 0 and deviation 1 over the training set, "unit" to 0 to 1.
        auto_augment: After crop and flip, randaugment (two random operations) or trivialaugment (one).
        randaugment_magnitude: Of randaugment's operations, 0 to 30; None is 9.
        auto_augment_fill: What moves in where it shifts or turns an image, mean (colour) or black; None is mean.
        color_jitter: By what share brightness, contrast and saturation vary each.
        random_erasing: Probability that a rectangle is filled with the data set's mean colour.
        validation_split: How much of the training set to hold out: a fraction below 1 or a number of images; 0 holds out none, and unless
            `validation_on_test` is given there is then no validation. None is 0.1 (0 for SAMPLE and with `validation_on_test`).
        validation_on_test: Validate on the test set. Its score is then no longer that of unseen data if anything is chosen by it.
        synthetic: Make images up in the shape of `dataset`: on the "host", or straight on the "ipu", that is on the device that trains.
        synthetic_kind: Class "pattern"s that can be learnt, or plain "noise" with random labels.
        synthetic_samples: Training images to make up (a fifth as many for the test); None is as many as the data set has.
        synthetic_classes: Number of classes to make up; None is as many as the data set has.
        synthetic_image_size: Height and width in pixels; None is the data set's.
        download: Whether a missing data set may be downloaded.
        seed: Decides which images are held out for validation, and the synthetic images.

    Raises:
        UserError: for an unknown data set, a split that cannot be, or options that exclude each other.
        DataNotFoundError: from `prepare_data` or `setup`, for files neither on disk nor to be downloaded.
        DataFileError: from `setup`, for a file that is cut off, damaged or not of this data set.
    """

    def __init__(
        self,
        *,
        dataset: str | None = None,
        data_dir: str | Path = "data",
        micro_batch_size: int = 32,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        augment: bool | None = None,
        crop_padding: int = PADDING,
        scaling: Literal["standard", "unit"] = "standard",
        auto_augment: Literal["randaugment", "trivialaugment"] | None = None,
        randaugment_magnitude: int | None = None,
        auto_augment_fill: Literal["mean", "black"] | None = None,
        color_jitter: float | None = None,
        random_erasing: float | None = None,
        validation_split: int | float | None = None,
        validation_on_test: bool = False,
        synthetic: Literal["host", "ipu"] | None = None,
        synthetic_kind: Literal["pattern", "noise"] = "pattern",
        synthetic_samples: int | None = None,
        synthetic_classes: int | None = None,
        synthetic_image_size: int | None = None,
        download: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"samples": synthetic_samples, "classes": synthetic_classes, "image_size": synthetic_image_size}
        sizes = {f"synthetic_{what}": value for what, value in sizes.items() if value is not None}
        for option, value in {"micro_batch_size": micro_batch_size, "eval_batch_size": eval_batch_size, **sizes}.items():
            if value is not None and value < 1:
                raise UserError(f"{option}: {value} is not possible; at least 1 is")
        if num_workers < 0:
            raise UserError(f"num_workers: {num_workers} is not possible; 0 loads in the training process")
        machine.check_processes(num_workers, "num_workers")
        if crop_padding < 0:
            raise UserError(f"crop_padding: {crop_padding} is not possible; 0 does not crop")
        if scaling not in ("standard", "unit"):
            raise UserError(f"scaling: {scaling!r} is unknown; legal are 'standard' and 'unit'")
        if synthetic not in (None, "host", "ipu"):
            raise UserError(f"synthetic: {synthetic!r} is unknown; legal are 'host' and 'ipu', or None for real images")
        if synthetic_kind not in ("pattern", "noise"):
            raise UserError(f"synthetic_kind: {synthetic_kind!r} is unknown; legal are 'pattern' and 'noise'")
        if synthetic_kind == "noise":
            sizes["synthetic_kind"] = "noise"
        if synthetic is None and sizes:
            option, value = next(iter(sizes.items()))
            raise UserError(f"{option}: {value!r} needs synthetic='host' or 'ipu'; real images have their own")
        if synthetic is not None and augment:
            raise UserError("augment: synthetic images cannot be augmented; leave it out or set it to false")
        single = {"auto_augment": auto_augment, "color_jitter": color_jitter, "random_erasing": random_erasing}
        single["auto_augment_fill"] = auto_augment_fill
        for option, value in single.items():
            if value is not None and (synthetic is not None or augment is False):
                why = "synthetic images cannot be augmented" if synthetic else "augment is false, which switches all augmentation off"
                raise UserError(f"{option}: {value} makes no sense: {why}")
        self.data_dir = Path(data_dir).expanduser()
        self.micro_batch_size = micro_batch_size
        self.eval_batch_size = eval_batch_size or micro_batch_size
        self.num_workers = num_workers
        self.augment = synthetic is None if augment is None else augment
        self.crop_padding = crop_padding
        self.validation_on_test = validation_on_test
        self.synthetic = synthetic
        self.download = download
        self.seed = seed
        self.dataset_name = self._resolve(dataset)
        facts = DATA_SETS[self.dataset_name]
        self.used_sample = self.dataset_name == "SAMPLE" and synthetic is None
        self.num_classes = synthetic_classes or facts.num_classes
        self.in_channels = facts.channels
        self.image_size = synthetic_image_size or facts.image_size
        self.synthesis = None
        self.mean, self.std = facts.mean, facts.std
        self.augmentation = ImageAugmentation(**single, magnitude=randaugment_magnitude, fill=facts.mean)
        available, self.num_test_samples = sum(facts.train_counts), sum(facts.test_counts)
        if synthetic is not None:
            self.synthesis = Synthesis(
                kind=synthetic_kind, classes=self.num_classes, channels=self.in_channels, image_size=self.image_size, seed=seed
            )
            self.mean, self.std = self.synthesis.mean, self.synthesis.std
            if synthetic_samples is not None:
                available, self.num_test_samples = synthetic_samples, max(1, synthetic_samples // 5)
        if scaling == "unit":
            self.mean, self.std = (0.0,) * self.in_channels, (1.0,) * self.in_channels
        self._validates_on_test = validation_on_test or (self.used_sample and validation_split is None)
        self._held_out = 0 if self._validates_on_test and validation_split is None else _held_out(validation_split, available)
        if self._held_out and validation_on_test:
            raise UserError(f"validation_split: {validation_split} holds out images that validation_on_test leaves unused; give only one")
        self.num_train_samples = available - self._held_out
        self.num_validation_samples = self.num_test_samples if self._validates_on_test else self._held_out
        self._normalisation: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def _resolve(self, dataset: str | None) -> str:
        """The data set to use; where none is named, one that is here already."""
        if dataset is not None:
            return known_data_set(dataset)
        return "CIFAR-10" if self.synthetic is not None else available_data_set(data_dir=self.data_dir)

    @property
    def description(self) -> str:
        """The data in a few words, for people."""
        if self.synthesis is not None:
            kind = {"pattern": "class patterns", "noise": "noise"}[self.synthesis.kind]
            facts, size = DATA_SETS[self.dataset_name], self.image_size
            shape = self.dataset_name
            if (size, self.num_classes) != (facts.image_size, facts.num_classes):
                shape = f"{self.in_channels} x {size} x {size} images of {self.num_classes:,} classes"
            return f"synthetic {kind} from the {self.synthetic}, in the shape of {shape}"
        return "SAMPLE (2,000 + 500 Fashion-MNIST images)" if self.used_sample else self.dataset_name

    @property
    def mirrors(self) -> bool:
        """Whether a mirrored image still shows its class."""
        return self.synthesis is None and DATA_SETS[self.dataset_name].flip

    @property
    def caveat(self) -> str | None:
        """A line that says what figures from these images do not show; None where nothing needs to be said."""
        if not self.used_sample:
            return None
        return "These figures are from the embedded sample (2,000 + 500 Fashion-MNIST images), not from CIFAR-10."

    def fingerprint(self) -> str:
        """Fingerprint of the training data: the data set, or how it is synthesised, and which of its images are not held out.

        Two data modules with the same fingerprint draw the same samples in the same order for one seed; a checkpoint can keep it.
        """
        made = self.synthesis and [self.synthesis.kind, self.synthesis.classes, self.image_size, self.synthesis.seed]
        return fingerprint(self.dataset_name, self.in_channels, made, self._parts["train"].rows.numpy())

    def prepare_data(self) -> None:
        """Download the data set if it is missing and may be downloaded."""
        if self.synthesis is None and self.download:
            fetch(self.dataset_name, data_dir=self.data_dir)

    def setup(self, stage: str | None = None) -> None:
        """Read the images (once) and choose those that are held out."""
        _ = self._parts  # read on first access, whichever hook comes first

    @cached_property
    def _parts(self) -> dict[str, Dataset]:
        """The data sets `train`, `validation` (absent without validation) and `test`."""
        train_total = self.num_train_samples + self._held_out
        train_rows, test_rows = np.arange(train_total), np.arange(self.num_test_samples)
        if self.synthesis is not None:
            make = partial(SyntheticDataset, synthesis=self.synthesis, on_device=self.synthetic == "ipu")
            labels = self.synthesis.labels(train_rows)
            test = make(rows=train_rows[-1] + 1 + test_rows)
            make_train = make_validation = make
        else:
            splits = load_images(self.dataset_name, data_dir=self.data_dir)
            images, labels = splits["train"]
            make = partial(ImageDataset, flip=DATA_SETS[self.dataset_name].flip, padding=self.crop_padding)
            test = make(images=splits["test"][0], labels=splits["test"][1], rows=test_rows, augment=False)
            make_train = partial(make, images=images, labels=labels, augment=self.augment, augmentation=self.augmentation)
            make_validation = partial(make, images=images, labels=labels, augment=False)
        kept, held_out = _split(labels.numpy(), self._held_out, seed=self.seed)
        parts = {"train": make_train(rows=kept), "test": test}
        if self._validates_on_test:
            parts["validation"] = test
        elif len(held_out):
            parts["validation"] = make_validation(rows=held_out)
        return parts

    def train_dataloader(self) -> DataLoader:
        """Training images, shuffled; the last batch may be smaller."""
        return self._loader("train", batch_size=self.micro_batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader | list:
        """Validation images in order, every one of them; an empty list without validation."""
        return self._loader("validation", batch_size=self.eval_batch_size) if "validation" in self._parts else []

    def test_dataloader(self) -> DataLoader:
        """Test images in order, every one of them."""
        return self._loader("test", batch_size=self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader:
        """The test images, for predictions."""
        return self.test_dataloader()

    def sample_images(self, count: int) -> Tensor:
        """The first training images, at most `count`, as training sees them in epoch 0: (B, C, H, W) float32, normalised."""
        training = self._parts["train"]
        return self.on_after_batch_transfer(training.seeded_batch(range(min(count, len(training))), seed=self.seed, epoch=0), 0)[0]

    def _loader(self, part: str, *, batch_size: int, shuffle: bool = False) -> DataLoader:
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return DataLoader(self._parts[part], batch_size=batch_size, shuffle=shuffle, **workers)

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """On the device: uint8 images (B, C, H, W), or offsets of synthetic ones (B,), to normalised float32 in channels_last order."""
        images, labels = batch
        if self.synthesis is not None and images.dim() == 1:
            images = self.synthesis.images(images, labels)
        if images.device not in self._normalisation:
            mean, std = (torch.tensor(values, device=images.device).view(1, -1, 1, 1) for values in (self.mean, self.std))
            self._normalisation[images.device] = (1 / (255 * std), -mean / std)
        scale, shift = self._normalisation[images.device]
        return images.to(torch.float32, memory_format=torch.channels_last).mul_(scale).add_(shift), labels


def _held_out(split: int | float | None, available: int) -> int:
    """Number of images that `validation_split` takes out of `available` training images."""
    split = 0.1 if split is None else split
    if isinstance(split, bool) or not (0 <= split < 1 if isinstance(split, float) else 0 <= split < available):
        raise UserError(f"validation_split: {split} is not possible; give a fraction from 0 to below 1, or 0 to {available - 1:,} images")
    return split if isinstance(split, int) else min(max(round(split * available), int(split > 0)), available - 1)


def _split(labels: np.ndarray, count: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to keep and rows to hold out: `count` of them, each class by its share, which ones decided by `seed` alone."""
    if count == 0:
        return np.arange(len(labels)), np.arange(0)
    shuffled = np.argsort(random_words(seed, SPLIT, indices=np.arange(len(labels))), kind="stable")
    place = np.empty(len(labels))  # of each row among its class, from 0 to 1: the lowest places of all classes together are held out
    members = shuffled[np.argsort(labels[shuffled], kind="stable")]  # class by class
    sizes = np.bincount(labels)
    place[members] = (np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 0.5) / np.repeat(sizes, sizes)
    held_out = np.sort(np.argsort(place, kind="stable")[:count])
    kept = np.ones(len(labels), dtype=bool)
    kept[held_out] = False
    return np.flatnonzero(kept), held_out
