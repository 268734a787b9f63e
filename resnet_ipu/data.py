"""The former home of ImageNet's data module, by which configurations and scripts name it."""

from resnet_ipu.imagenet.dataset import ImageDataset
from resnet_ipu.imagenet.folders import FolderImages, class_order, synset_words
from resnet_ipu.imagenet.layout import MANIFEST, find_layout
from resnet_ipu.imagenet.module import ImageNetDataModule

__all__ = ["MANIFEST", "FolderImages", "ImageDataset", "ImageNetDataModule", "class_order", "find_layout", "synset_words"]
