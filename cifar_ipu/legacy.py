"""Words of the original programs: options that are carried out under other names."""

from __future__ import annotations

from lightning_ipu.command.options import Option
from lightning_ipu.command.readers import positive
from lightning_ipu.command.rows import PLAN

LEGACY_OPTIONS = (
    Option(name="--model_shard_position", group=PLAN, type=positive(), help="the original's spelling of --model-shard-position", original=True),
)  # fmt: skip
