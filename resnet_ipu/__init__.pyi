"""What type checkers know of the names that the package loads when they are first used."""

from resnet_ipu.augment import Mixing as Mixing
from resnet_ipu.imagenet.folders import FolderImages as FolderImages
from resnet_ipu.imagenet.module import ImageNetDataModule as ImageNetDataModule
from resnet_ipu.module import ResNetModule as ResNetModule
from resnet_ipu.module import load_pretrained as load_pretrained
from resnet_ipu.networks import ResNet as ResNet
from resnet_ipu.networks import resnet as resnet
