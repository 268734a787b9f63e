"""Check, before anything runs, the names of the submodules that each begin a stage, and how many stages a network can have."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_ipu.plan import PlanError


def check_splits(module: nn.Module, splits: list[str]) -> None:
    """Check the names of the submodules that each begin a new stage, in the order in which the network holds them.

    Raises:
        PlanError: a name that is unknown, given twice, out of order, or that leaves a stage without any parameters or submodules.
    """
    check_names(module, splits)
    names = [name for name, _ in module.named_modules() if name]
    for before, split in zip(splits, splits[1:], strict=False):
        if names.index(split) < names.index(before):
            raise PlanError(
                f"pipeline_splits has {split!r} after {before!r}, but the network runs it before; name them in the network's order"
            )
        if names.index(split) == names.index(before) + 1 and split.startswith(before + "."):
            raise PlanError(f"pipeline_splits {before!r} and {split!r} begin at the same place: the stage between them would be empty")
    if splits and not any(True for _ in _leaves_before(module, splits[0])):
        raise PlanError(
            f"pipeline_splits={splits[0]!r} is where the network begins: the first stage would be empty; name a later submodule"
        )


def check_names(module: nn.Module, splits: list[str]) -> None:
    names = [name for name, _ in module.named_modules() if name]
    for place, split in enumerate(splits):
        if split not in names:
            close = difflib.get_close_matches(split, names, n=3, cutoff=0.4) or names[:6]
            raise PlanError(f"pipeline_splits={split!r} is no submodule of {type(module).__name__}; near names are {', '.join(close)}")
        if split in splits[:place]:
            raise PlanError(f"pipeline_splits names {split!r} twice; each submodule can begin one stage")


def check_num_stages(module: nn.Module, num_stages: int) -> None:
    """Check that a network has enough submodules for so many stages.

    Raises:
        PlanError: more stages than leaf submodules with parameters.
    """
    # A parametrized layer (torch.nn.utils.parametrizations) holds modules that make its weights.
    blocks = sum(
        1
        for child in module.modules()
        if all(name == "parametrizations" for name, _ in child.named_children())
        and not isinstance(child, ParametrizationList)
        and next(child.parameters(), None) is not None
    )
    if num_stages > max(blocks, 1):
        raise PlanError(f"num_stages={num_stages} is more than the {blocks} layers with parameters that {type(module).__name__} has")


def _leaves_before(module: nn.Module, split: str) -> Iterator[str]:
    """Names of the leaf submodules that the network holds before one of its submodules."""
    for name, child in module.named_modules():
        if name == split:
            return
        if name and next(child.children(), None) is None:
            yield name
