"""CosmoFlow: from the three-dimensional distribution of matter to the parameters of the universe."""

import importlib
from typing import Any

# Public names and the modules they live in, loaded when first used: `--help` needs no torch.
_HOMES = {
    "CosmoFlow": "networks",
    "CosmoFlowDataModule": "data.module",
    "CosmoFlowModule": "module",
    "CosmoResNet": "networks",
    "Universes": "universe",
    "cosmoflow": "networks",
    "power_spectrum": "universe",
    "write_universes": "data.simulate",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
