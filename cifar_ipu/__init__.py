"""The CIFAR CNN, and the small-image data sets (CIFAR-10, CIFAR-100, MNIST, Fashion-MNIST, an embedded sample)."""

import importlib
from typing import Any

# Public names and the modules they live in, loaded when first used: `--help` needs no torch.
_HOMES = {
    "CIFARModule": "module",
    "ImageAugmentation": "augment",
    "ImageDataModule": "data.module",
    "estimator_cnn": "networks",
    "keras_cnn": "networks",
    "load_images": "data.files",
    "whitened_cnn": "networks",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
