"""The settings that a command has beside LightningCLI's own: their keys, their defaults, and values that are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt
from pytorch_lightning.cli import LightningArgumentParser

from lightning_ipu import machine
from lightning_ipu.command.configs import COMMAND
from lightning_ipu.command.lifecycle import BestCheckpoint
from lightning_ipu.command.readers import LARGEST_SEED
from lightning_ipu.command.scoring import VAL_ACCURACY
from lightning_ipu.errors import UserError
from lightning_ipu.loop.events import EventsPerEpoch
from lightning_ipu.precision.names import CHOICES, HALF_TYPES

_PATHS = ("trainer.default_root_dir", "ckpt_path", "checkpoint_input_dir", "data.data_dir", "data.index_dir", "model.pretrained")


def add_arguments(parser: LightningArgumentParser, *, prog: str, links: Sequence[tuple[str, str]], defaults: Mapping[str, Any]) -> None:
    """Add the keys that every command has; for `prog`, `links` and `defaults` see `Command`."""
    _add_run(parser, prog)
    _add_reports(parser)
    parser.add_function_arguments(set_up_machine, "machine", skip={"processes"})
    for attribute, argument in links:
        parser.link_arguments(f"data.{attribute}", f"model.{argument}", apply_on="instantiate")
    parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
    parser.add_lightning_class_args(EventsPerEpoch, "events")
    parser.set_defaults(
        {
            "checkpoint.monitor": VAL_ACCURACY,
            "checkpoint.mode": "max",
            "checkpoint.filename": "best-update{step}",
            "checkpoint.auto_insert_metric_name": False,
            "checkpoint.enable_version_counter": False,  # a resumed run writes the same file again
            **defaults,
        }
    )


def _add_run(parser: LightningArgumentParser, prog: str) -> None:
    """What is trained, from where and for how long."""
    parser.add_argument(
        "--precision",
        type=Literal[CHOICES],
        default="auto",
        help="<compute>.<weights>; auto is 16.32 where the device is fast at bfloat16, else 32.32. Saved as it was resolved.",
    )
    parser.add_argument(
        "--half_type",
        type=Literal[HALF_TYPES],
        default="bf16",
        help="the 16-bit type of precision 16.16 and 16.32; fp16 is for GPUs",
    )
    parser.add_argument("--resume", type=bool, default=False, help="resume the run in default_root_dir; start it if there is none yet")
    parser.add_argument(
        "--checkpoint_every", type=PositiveInt | None, default=None, help="weight updates between checkpoints; null: one per epoch"
    )
    parser.add_argument("--keep_last", type=PositiveInt, default=1, help="how many of the latest checkpoints are kept")
    parser.add_argument(
        "--short_options",
        type=dict | None,
        default=None,
        help="short options that this configuration was made from; --resume reads them",
    )
    parser.add_argument(f"--{COMMAND}", type=str, default=prog, help="the command that this configuration belongs to")
    parser.add_argument(
        "--epochs",
        type=PositiveFloat | None,
        help="passes over the training set; may be a fraction: the run then ends after round(epochs x weight updates per epoch)."
        " In place of trainer.max_epochs, or max_steps, under which the result is saved.",
    )


def _add_reports(parser: LightningArgumentParser) -> None:
    """What is printed and logged while it runs, and scored afterwards."""
    parser.add_argument(
        "--then_validate",
        type=bool,
        default=False,
        help="after fit, validate the final weights, unless it ended with a validation of them, and the checkpoints made per epoch",
    )
    parser.add_argument("--then_test", type=bool, default=False, help="after fit, score the test set")
    parser.add_argument(
        "--log_interval",
        type=PositiveFloat | None,
        help="seconds between progress lines; null is 10, but none on a terminal, which shows a progress bar",
    )
    parser.add_argument(
        "--checkpoint_input_dir",
        type=str | None,
        default=None,
        help="score every checkpoint in it, in the order of their weight updates",
    )
    parser.add_argument("--clean_dir", type=bool, default=False, help="delete checkpoints made per epoch once they have been scored")
    parser.add_argument("--wandb", type=bool, default=False, help="log to Weights & Biases as well; offline with WANDB_MODE=offline")
    parser.add_argument("--wandb_run_name", type=str | None, default=None, help="name of the run there")
    parser.add_argument("--wandb_tags", type=list[str] | None, default=None, help="tags of the run there")


def check_settings(config: Namespace) -> None:
    """Refuse values that Lightning, numpy or the system would misread or crash on."""
    seed = config.seed_everything
    if not isinstance(seed, bool) and not 0 <= seed <= LARGEST_SEED:
        raise UserError(f"seed_everything={seed} must lie between 0 and {LARGEST_SEED}")
    if config.trainer.default_root_dir is None:
        raise UserError("trainer.default_root_dir=null: the results need a directory; write ./null for one of that name")
    for name in _PATHS:
        if (value := config.get(name)) is None:
            continue
        if not str(value).strip():
            raise UserError(f"{name} is empty: give a path")
        config[name] = type(value)(os.path.expanduser(value))


def set_up_machine(threads: int | None = None, keep_freed_memory: bool = True, *, processes: int = 1) -> None:
    """Make the settings that change the speed but no result, before anything large is allocated.

    Args:
        threads: threads of one operation; null is OMP_NUM_THREADS, or this process's share of the cores that it may use.
        keep_freed_memory: tell glibc to keep big blocks of memory instead of handing them back to the system.
        processes: that share this machine's cores.
    """
    if keep_freed_memory:
        machine.keep_freed_memory()
    machine.set_threads(threads, processes=processes)
