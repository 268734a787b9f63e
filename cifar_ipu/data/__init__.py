"""Small-image data sets, each held whole in memory: their files, their downloads, images made up in their shape, and the data module."""

from cifar_ipu.data.dataset import ImageDataset, random_crop_and_flip
from cifar_ipu.data.download import available_data_set, fetch, settle_data_set
from cifar_ipu.data.facts import DATA_SETS, DataSetFacts, Layout
from cifar_ipu.data.files import DataFileError, DataNotFoundError, is_on_disk, load_images
from cifar_ipu.data.module import ImageDataModule
from cifar_ipu.data.synthetic import Synthesis, SyntheticDataset
from cifar_ipu.data.words import random_words

__all__ = [
    "DATA_SETS", "DataFileError", "DataNotFoundError", "DataSetFacts", "ImageDataModule", "ImageDataset", "Layout", "Synthesis",
    "SyntheticDataset", "available_data_set", "fetch", "is_on_disk", "load_images", "random_crop_and_flip", "random_words", "settle_data_set",
]  # fmt: skip
