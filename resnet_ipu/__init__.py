"""ResNet and ResNeXt image classifiers, trained under the IPU execution model."""

import importlib
from typing import Any

# Public names and the modules they live in, loaded when first used: `--help` needs no torch.
_HOMES = {
    "FolderImages": "imagenet.folders",
    "ImageNetDataModule": "imagenet.module",
    "Mixing": "augment",
    "ResNet": "networks",
    "ResNetModule": "module",
    "load_pretrained": "module",
    "resnet": "networks",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
