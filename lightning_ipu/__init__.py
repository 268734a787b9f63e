"""A PyTorch Lightning strategy with the execution model of Graphcore's IPU; importing it registers `strategy="ipu"`."""

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "AveragedWeights": "recipe.averaging",
    "EventsPerEpoch": "loop.events",
    "IPUStrategy": "strategy",
    "ImageClassifier": "recipe.classifier",
    "Plan": "plan",
    "PlanError": "plan",
    "ProfileReports": "command.profiling",
    "SlowdownWatch": "command.slowdown",
}
__all__ = list(_HOMES)

# Our commands answer --help and wrong options without torch: their main modules say so, and load the strategy when they need it.
if not getattr(sys.modules.get("__main__"), "LIGHT_START", False):
    importlib.import_module("lightning_ipu.strategy")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"lightning_ipu.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
