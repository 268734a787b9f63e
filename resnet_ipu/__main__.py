"""``python -m resnet_ipu``: train a ResNet or ResNeXt under the IPU execution model, then validate it.

What needs torch is imported when a run starts, so that ``--help`` and wrong options are answered at once.
"""

from __future__ import annotations

LIGHT_START = True  # `import lightning_ipu` leaves torch alone when the main module says so

import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from lightning_ipu import machine  # noqa: E402
from lightning_ipu.command import configs, once, program  # noqa: E402
from lightning_ipu.command.options import UsageError  # noqa: E402
from lightning_ipu.command.words import pairs, value_of  # noqa: E402
from lightning_ipu.errors import UserError  # noqa: E402
from resnet_ipu.options import (  # noqa: E402
    CONFIGS,
    CONVERT,
    CONVERT_OPTIONS,
    DESCRIPTION,
    EPILOG,
    EPOCHS,
    EPOCHS_ON_SAMPLE,
    IMAGENET_SIZE,
    IMAGENET_SIZE_ON_CPU,
    OPTIONS,
    TOY_MODELS,
)
from resnet_ipu.rules import settle  # noqa: E402

if TYPE_CHECKING:
    from lightning_ipu.command.run import CommandLine


def start(arguments: list[str], *, given: dict[str, Any]) -> int:
    """Run LightningCLI with this package's classes; returns the exit status."""
    from cifar_ipu.data import ImageDataModule, settle_data_set
    from lightning_ipu.command.run import Command, run_command
    from resnet_ipu.imagenet.module import ImageNetDataModule
    from resnet_ipu.module import ResNetModule

    try:
        imagenet = _is_imagenet(arguments)
    except UserError as error:
        once.report(str(error), prog="resnet_ipu")
        return 2
    command = Command(
        prog="resnet_ipu",
        model_class=ResNetModule,
        datamodule_class=ImageNetDataModule if imagenet else ImageDataModule,
        links=[("num_classes", "num_classes"), ("in_channels", "in_channels"), ("image_size", "image_size")],
        facts=_facts,
        epochs=lambda data: (EPOCHS_ON_SAMPLE, "chosen for the embedded sample") if data.used_sample else (EPOCHS, None),
        note=lambda line: line.datamodule.caveat,
        **({} if imagenet else {"settle": settle_data_set}),
    )
    if given.get("dataset") == "IMAGENET" and "synthetic_data" in given and "image_size" not in given:
        import torch

        on_gpu = given.get("device") == "gpu" or given.get("device", "auto") == "auto" and torch.cuda.is_available()
        arguments = [*arguments, f"--data.synthetic_image_size={IMAGENET_SIZE if on_gpu else IMAGENET_SIZE_ON_CPU}"]
    if not given.get("training", True) and (hardware := given.get(configs.HARDWARE)):  # a run without training has no table
        print(f"no effect here: {configs.listed(hardware)} ({configs.HARDWARE})")
    if "data_benchmark" in given:
        from resnet_ipu.throughput import DataBenchmark

        return run_command(command, arguments, line=DataBenchmark)
    return run_command(command, arguments)


def _is_imagenet(arguments: list[str]) -> bool:
    """Whether LightningCLI's arguments are about images in folders or shards, which have a data module of their own.

    As everywhere, what is typed overrides a configuration, and a configuration overrides a checkpoint.
    """

    from lightning_ipu.command.lifecycle import SETTINGS, latest_checkpoint
    from lightning_ipu.command.output import CHECKPOINTS
    from lightning_ipu.files import read_checkpoint

    words = dict(pairs(arguments))
    said, directory = value_of(arguments, "data", "dataset"), value_of(arguments, "trainer", "default_root_dir")
    path = words.get("--ckpt_path")
    if path is None and "--checkpoint_input_dir" in words:
        path = latest_checkpoint(Path(words["--checkpoint_input_dir"]))
    if path == "last" or words.get("--resume") == "true" and path is None:
        path = latest_checkpoint(Path(directory or "results") / CHECKPOINTS)
    if path is not None and Path(path).is_file():
        trained_on = read_checkpoint(path).get(SETTINGS, {}).get("data.dataset")
        wanted = said or trained_on
        if trained_on is not None and wanted != trained_on and "IMAGENET" in (wanted, trained_on):
            raise UsageError(
                f"data.dataset {wanted}, but {path} was trained on {trained_on}: leave data.dataset out, or give another checkpoint"
            )
        said = wanted
    return str(said or "").upper() == "IMAGENET"  # the wrong case is refused later


def _facts(line: CommandLine) -> list[tuple[str, str]]:
    """Rows for the table: network, data, device, precision, and what options were carried out as or have no effect."""
    data, size, given = line.datamodule, line.model.hparams.size, line.short_options
    network = f"ResNeXt-{size[1:]} (32x4d)" if size.startswith("x") else size if size in TOY_MODELS else f"ResNet-{size}"
    images = f"{data.num_train_samples:,} to train on, {data.num_validation_samples:,} to validate on"
    classes = [("classes", data.class_summary)] if data.dataset_name == "IMAGENET" else []
    extra = []
    if (group := given.get("dbn_replica_group_size", 1)) > 1:
        extra.append(("batch norms", f"over groups of {group} replicas, carried out as one replica with the group's samples"))
    if given.get("dataset") == "IMAGENET" and "synthetic_data" in given and "image_size" not in given:
        sizes = f"{IMAGENET_SIZE} on a GPU, {IMAGENET_SIZE_ON_CPU} on a CPU"
        extra.append(("image size", f"{data.image_size} pixels; {sizes}, --image-size chooses"))
    if hardware := given.get(configs.HARDWARE):
        extra.append(("no effect here", f"{configs.listed(hardware)} ({configs.HARDWARE})"))
    return [("network", network), ("data", data.description), ("images", images), *classes, *line.machine_facts(), *extra]


def _convert(words: list[str]) -> int:
    """Make TFRecord shards of folders of images."""
    places, rest = words[:2], words[2:]
    if any(word.startswith("-") for word in places):
        places, rest = [], words

    def run(given: dict[str, Any]) -> None:
        if len(places) < 2 or not all(place.strip() for place in places):
            raise UsageError("give the folder to read and the one to write to: resnet_ipu convert SRC DST")
        from lightning_ipu.command.messages import keep_quiet
        from resnet_ipu.convert import convert

        with keep_quiet("resnet_ipu convert"):
            convert(
                *(Path(place).expanduser() for place in places),
                shards={"train": given.get("train_shards"), "validation": given.get("validation_shards")},
                seed=given.get("seed", 0),
                workers=given.get("num_workers", machine.usable_cores()),
                on_bad_image=given.get("on_bad_image", "raise"),
            )

    return program.other(rest, prog="resnet_ipu convert", what=CONVERT, options=CONVERT_OPTIONS, run=run, places="SRC DST ")


def main(words: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    return program.main(
        words,
        prog="resnet_ipu",
        description=DESCRIPTION,
        epilog=EPILOG,
        options=OPTIONS,
        settle=settle,
        start=start,
        others={"convert": _convert},
        folder=CONFIGS,
    )


if __name__ == "__main__":
    sys.exit(main())
