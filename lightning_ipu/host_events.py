"""The name under which earlier configurations know `lightning_ipu.EventsPerEpoch`."""

from lightning_ipu.loop.events import EventsPerEpoch

__all__ = ["EventsPerEpoch"]
