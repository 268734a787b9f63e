"""The earlier path of what decodes and crops images; it lives in `resnet_ipu.imagenet.images`."""

from resnet_ipu.imagenet.images import ImageError, center_crop, decode, training_crop

__all__ = ["ImageError", "center_crop", "decode", "training_crop"]
