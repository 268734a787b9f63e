"""``python -m cifar_ipu``: train a small CNN on small images under the IPU execution model, then score it on the whole test set.

What needs torch is imported when a run starts, so that ``--help`` and wrong options are answered at once.
"""

from __future__ import annotations

LIGHT_START = True  # `import lightning_ipu` leaves torch alone when the main module says so

import os  # noqa: E402
import sys  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from cifar_ipu.options import CONFIGS, DESCRIPTION, EPILOG, EPOCHS, EPOCHS_IN_A_HURRY, EPOCHS_ON_SAMPLE, OPTIONS  # noqa: E402
from cifar_ipu.rules import OF_A_TEST, settle  # noqa: E402
from lightning_ipu.command import program  # noqa: E402

if TYPE_CHECKING:
    from lightning_ipu.command.run import CommandLine


def start(arguments: list[str], *, given: dict[str, Any]) -> int:
    """Run LightningCLI with this package's classes; returns the exit status."""
    if "profile" in given:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library talks to standard error

    from cifar_ipu.data import ImageDataModule, settle_data_set
    from cifar_ipu.module import CIFARModule
    from lightning_ipu.command.run import Command, run_command

    epochs = EPOCHS_IN_A_HURRY if given.get("recipe") == "fast" else EPOCHS[given.get("network", "keras")]
    command = Command(
        prog="cifar_ipu",
        model_class=CIFARModule,
        datamodule_class=ImageDataModule,
        links=[("num_classes", "num_classes"), ("in_channels", "in_channels"), ("image_size", "image_size")],
        facts=_facts,
        epochs=lambda data: (EPOCHS_ON_SAMPLE, "chosen for the embedded sample") if data.used_sample else (epochs, None),
        note=lambda line: line.datamodule.caveat,
        settle=settle_data_set,
    )
    if "test_only" in given:
        arguments = ["test", *arguments[1:]]
        if idle := [option.name for option in OPTIONS if option.dest in given and option.dest not in OF_A_TEST]:
            print(f"cifar_ipu: --test-only scores a checkpoint as it was trained; of no effect beside it: {', '.join(idle)}")
    return run_command(command, arguments)


def _facts(line: CommandLine) -> list[tuple[str, str]]:
    """Rows for the table: network, data, device, precision."""
    data = line.datamodule
    held_out = f"{data.num_validation_samples:,} to validate on, " if data.num_validation_samples else ""
    images = f"{data.num_train_samples:,} to train on, {held_out}{data.num_test_samples:,} to test on"
    return [("network", line.model.hparams.network), ("data", data.description), ("images", images), *line.machine_facts()]


def main(words: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    return program.main(
        words,
        prog="cifar_ipu",
        description=DESCRIPTION,
        epilog=EPILOG,
        options=OPTIONS,
        settle=settle,
        start=start,
        others={},
        folder=CONFIGS,
    )


if __name__ == "__main__":
    sys.exit(main())
