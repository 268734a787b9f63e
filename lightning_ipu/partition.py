"""Cut a network into stages: check the submodules that are named to begin one."""

from __future__ import annotations

import difflib

from torch import nn

from lightning_ipu.plan import PlanError


def check_splits(module: nn.Module, splits: list[str]) -> None:
    """Check the names of the submodules that each begin a new stage, in the order in which the network holds them.

    Raises:
        PlanError: a name that is unknown, given twice, out of order, or that leaves a stage without any parameters or submodules.
    """
    names = [name for name, _ in module.named_modules() if name]
    seen: list[str] = []
    for split in splits:
        if split not in names:
            close = difflib.get_close_matches(split, names, n=3, cutoff=0.4) or names[:6]
            raise PlanError(f"pipeline_splits={split!r} is no submodule of {type(module).__name__}; near names are {', '.join(close)}")
        if split in seen:
            raise PlanError(f"pipeline_splits names {split!r} twice; each submodule can begin one stage")
        if seen and names.index(split) < names.index(seen[-1]):
            raise PlanError(
                f"pipeline_splits has {split!r} after {seen[-1]!r}, but the network runs it before; name them in the network's order"
            )
        if seen and names.index(split) == names.index(seen[-1]) + 1 and split.startswith(seen[-1] + "."):
            raise PlanError(f"pipeline_splits {seen[-1]!r} and {split!r} begin at the same place: the stage between them would be empty")
        seen.append(split)
    if seen and not any(True for _ in _leaves_before(module, seen[0])):
        raise PlanError(f"pipeline_splits={seen[0]!r} is where the network begins: the first stage would be empty; name a later submodule")


def check_num_stages(module: nn.Module, num_stages: int) -> None:
    """Check that a network has enough submodules for so many stages.

    Raises:
        PlanError: more stages than leaf submodules with parameters.
    """
    blocks = sum(1 for child in module.modules() if next(child.children(), None) is None and next(child.parameters(), None) is not None)
    if num_stages > blocks:
        raise PlanError(f"num_stages={num_stages} is more than the {blocks} layers with parameters that {type(module).__name__} has")


def _leaves_before(module: nn.Module, split: str):
    """Names of the leaf submodules that the network holds before one of its submodules."""
    for name, child in module.named_modules():
        if name == split:
            return
        if name and next(child.children(), None) is None:
            yield name
