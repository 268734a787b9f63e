"""The row that describes a short option, and the options that every command has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_ipu.command.readers import choice, path, positive
from lightning_ipu.errors import UserError

SUBCOMMANDS = ("fit", "validate", "test", "predict")


class UsageError(UserError):
    """A command line that cannot be carried out; the message is the one line that a person reads."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One row of a command's table.

    Args:
        name: as typed, ``--batch-size``.
        key: LightningCLI's key that a given value goes to; None where the command's own rules turn the value into settings.
        sets: the value that a flag gives to the key: false for a flag that switches something off. ``--flag false`` gives the opposite.
        type: what reads the text; ``bool`` makes the option a flag, which takes true or false as well.
        default: shown in the help, and the value where the option is not given. None means that a rule decides: then ``shown``
            says which.
        shown: the default in words. A flag has it where it may be on without being given: then its rules are told of a false, too.
        help: one sentence.
        group: heading in the help.
        metavar: placeholder for the value in the help.
        excludes: an option, or several, that cannot be given together with this one.
        refused: why this option of the original programs is not supported. ``--help-originals`` lists it, and it is refused by name.
        also: the names that it has in the other commands, which are read too.
        aliases: the option's names in the original programs, listed by ``--help-originals``.
        rare: whether ``--help-all`` alone lists it.
        original: whether it is a word of the original programs that means the same as another option: ``--help-originals`` lists it.
    """

    name: str
    group: str
    help: str = ""
    key: str | None = None
    sets: bool = True
    type: Callable[[str], Any] = str
    default: Any = None
    shown: str | None = None
    metavar: str | None = None
    excludes: str | tuple[str, ...] | None = None
    refused: str | None = None
    also: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    rare: bool = False
    original: bool = False

    @property
    def dest(self) -> str:
        return _dest(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that it is read by."""
        return (self.name, *self.also, *self.aliases)

    @property
    def excluded(self) -> list[str]:
        """The names, with underscores, of the options that this one excludes."""
        names = (self.excludes,) if isinstance(self.excludes, str) else self.excludes or ()
        return [_dest(name) for name in names]


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


RUN = "run (changes speed and output, and by --precision the numbers)"

MACHINE_OPTIONS = (
    Option(name="--device", group=RUN, key="trainer.accelerator", type=choice("auto", "cpu", "gpu"), default="auto", help="where to run"),
    Option(
        name="--threads",
        group=RUN,
        key="machine.threads",
        type=positive(),
        shown="OMP_NUM_THREADS, else the cores it may use",
        help="threads of one operation",
    ),
    Option(
        name="--no-allocator-setting",
        group=RUN,
        key="machine.keep_freed_memory",
        sets=False,
        type=bool,
        rare=True,
        help="leave glibc's allocator alone; else it keeps freed memory, which is faster",
    ),
    Option(
        name="--no-core-binding",
        group=RUN,
        key="trainer.strategy.bind_cores",
        sets=False,
        type=bool,
        rare=True,
        help="do not bind processes to cores; else each of several keeps to its share of them",
    ),
)

CHECKPOINT_OPTIONS = (
    Option(
        name="--resume",
        group="checkpoints",
        key="resume",
        type=bool,
        help="resume the run in the output directory, with the options it was started with; start it if there is none yet",
    ),
    Option(
        name="--checkpoint-every",
        group="checkpoints",
        key="checkpoint_every",
        type=positive(),
        shown="one per epoch",
        help="save after every N weight updates as well",
    ),
    Option(
        name="--keep-last",
        group="checkpoints",
        key="keep_last",
        type=positive(),
        default=1,
        help="keep the latest N checkpoints, beside the best",
    ),
)

AVERAGE_OPTIONS = (
    Option(
        name="--checkpoint-input-path",
        group="average",
        metavar="DIR",
        type=path,
        shown="results/checkpoints",
        help="directory of a run's checkpoints, or the run's output directory",
    ),
    Option(
        name="--checkpoint-output-path",
        group="average",
        metavar="FILE",
        type=path,
        shown="averaged.ckpt beside them",
        help="file for the average",
    ),
    Option(
        name="--weight-avg-strategy",
        group="average",
        type=choice("mean", "exponential"),
        shown="mean",
        help="weigh all alike, or newer ones more",
    ),
    Option(
        name="--weight-avg-exp-decay",
        group="average",
        type=positive(float),
        metavar="X",
        shown="0.99",
        help="exponential: from the oldest on, average = X x average + (1 - X) x weights",
    ),
    Option(name="--weight-avg-N", group="average", type=int, metavar="N", shown="-1", help="how many of the newest; -1 for all"),
)
