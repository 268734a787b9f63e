"""The name under which earlier configurations know `lightning_ipu.AveragedWeights`."""

from lightning_ipu.recipe.averaging import AveragedWeights

__all__ = ["AveragedWeights"]
