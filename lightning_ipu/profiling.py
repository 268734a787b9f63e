"""The name under which earlier configurations know `lightning_ipu.ProfileReports`."""

from lightning_ipu.command.profiling import ProfileReports

__all__ = ["ProfileReports"]
