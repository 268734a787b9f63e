"""What type checkers know of the names that the package loads when they are first used."""

from cifar_ipu.augment import ImageAugmentation as ImageAugmentation
from cifar_ipu.data.files import load_images as load_images
from cifar_ipu.data.module import ImageDataModule as ImageDataModule
from cifar_ipu.module import CIFARModule as CIFARModule
from cifar_ipu.networks import estimator_cnn as estimator_cnn
from cifar_ipu.networks import keras_cnn as keras_cnn
from cifar_ipu.networks import whitened_cnn as whitened_cnn
