"""A PyTorch Lightning strategy with the execution model of Graphcore's IPU; importing it registers `strategy="ipu"`."""

import sys
from typing import Any

__version__ = "0.1.0"
__all__ = ["IPUStrategy", "Plan", "PlanError"]

# Our commands answer --help and wrong options without torch: their main modules say so, and load the strategy when they need it.
if not getattr(sys.modules.get("__main__"), "LIGHT_START", False):
    from lightning_ipu.plan import Plan, PlanError
    from lightning_ipu.strategy import IPUStrategy


def __getattr__(name: str) -> Any:
    if name in __all__:
        from lightning_ipu import plan, strategy

        return strategy.IPUStrategy if name == "IPUStrategy" else getattr(plan, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
