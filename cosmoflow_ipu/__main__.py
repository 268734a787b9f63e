"""``python -m cosmoflow_ipu``: learn the parameters of universes from their particle counts under the IPU execution model.

What needs torch is imported when a run starts, so that ``--help`` and wrong options are answered at once.
"""

from __future__ import annotations

LIGHT_START = True  # `import lightning_ipu` leaves torch alone when the main module says so

import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from cosmoflow_ipu.legacy import with_named_config  # noqa: E402
from cosmoflow_ipu.options import CONFIGS, DESCRIPTION, EPILOG, EPOCHS, GENERATE_OPTIONS, OPTIONS, SHOW_OPTIONS  # noqa: E402
from cosmoflow_ipu.rules import settle  # noqa: E402
from lightning_ipu.command import program  # noqa: E402
from lightning_ipu.command.options import SUBCOMMANDS, Option, UsageError  # noqa: E402
from lightning_ipu.command.parser import settings_of  # noqa: E402

if TYPE_CHECKING:
    from lightning_ipu.command.run import CommandLine


def start(arguments: list[str], *, given: dict[str, Any]) -> int:
    """Run LightningCLI with this package's classes; returns the exit status."""
    from cosmoflow_ipu.data import CosmoFlowDataModule
    from cosmoflow_ipu.module import CosmoFlowModule
    from lightning_ipu.command.run import Command, run_command

    command = Command(
        prog="cosmoflow_ipu",
        model_class=CosmoFlowModule,
        datamodule_class=CosmoFlowDataModule,
        links=[("input_size", "input_size"), ("in_channels", "in_channels"), ("physical_spread", "physical_spread")],
        facts=_facts,
        epochs=lambda data: (EPOCHS, None),
        note=_note,
        defaults={"model.report": True, "checkpoint.monitor": "val_mae", "checkpoint.mode": "min"},
    )
    if given.get("data_benchmark"):
        from cosmoflow_ipu.throughput import DataBenchmark

        return run_command(command, arguments, line=DataBenchmark)
    return run_command(command, arguments)


def _facts(line: CommandLine) -> list[tuple[str, str]]:
    """Rows for the table: network, data, device, precision."""
    data, options = line.datamodule, line.model.hparams
    seen = "log(1 + counts)" if options.apply_log else "counts / mean"
    samples = f"{data.num_train_samples:,} to train on, {data.num_validation_samples:,} to validate on"
    return [("network", f"{options.network}, of {seen}"), ("data", data.description), ("samples", samples), *line.machine_facts()]


def _note(line: CommandLine) -> str | None:
    """The closing line: errors of the last evaluation, and what they are not."""
    from cosmoflow_ipu.module import MIDDLE, mae_line

    data, reported = line.datamodule, line.model.reported
    names = {"val": "", "test": "test "}
    lines = []
    for prefix, scores in reported.items():
        lines.append(names[prefix] + mae_line(scores, prefix, spread=data.physical_spread))
        if scores[f"{prefix}_mae"] >= scores[MIDDLE] and data.dataset_name != "dummy":
            lines.append(
                f"That is no better than a constant: the middle of each range gets {scores[MIDDLE]:.4f}. Train for longer, or on more universes."
            )
    if line.short_options.get("print_fom") and "val" in reported:
        lines.append(f"FoM: {reported['val']['val_mae']:.6f}")
    if data.dataset_name == "dummy":
        lines.append("These figures are of one random cube over and over: they tell the speed, and nothing was learned.")
    return "\n".join(lines) or None


def _generate(words: list[str]) -> int:
    """Write a data set of simulated universes."""

    def run(given: dict[str, Any]) -> None:
        if "output_dir" not in given:
            raise UsageError("generate needs --output-dir DIR, the folder to write to")
        from cosmoflow_ipu.data import SPLITS, CosmoFlowDataModule, write_universes

        data, folder = CosmoFlowDataModule(**_data_options(given, GENERATE_OPTIONS)), Path(given["output_dir"])
        write_universes(
            folder,
            data.universes,
            sample_size=data.input_size,
            indices=data.indices(SPLITS),
            pack=data.pack,
            workers=given.get("num_workers"),
        )
        files = sorted(folder.glob("*/*.tfrecord"))
        print(f"{folder}: {len(files):,} universes, {sum(path.stat().st_size for path in files) / 1e6:,.1f} MB; {data.description}")

    what = "Write a data set of simulated universes as TFRecord files; goes on where it was interrupted."
    return program.other(words, prog="cosmoflow_ipu generate", what=what, options=GENERATE_OPTIONS, run=run)


def _show(words: list[str]) -> int:
    """Draw a simulated universe."""

    def run(given: dict[str, Any]) -> None:
        from cosmoflow_ipu.pictures import draw_universe
        from cosmoflow_ipu.universe import Universes
        from lightning_ipu.files import check_writable

        options = _data_options({"cells": 64, **given}, SHOW_OPTIONS)
        universes = Universes(**{"voxel_size": 4.0, "oversample": 2, "spread": 0.3, "seed": given.get("seed", 0), **options})
        path = Path(given.get("output", "universe.png"))
        check_writable(path.parent)
        try:
            draw_universe(universes, given.get("index", 0), path=path)
        except ModuleNotFoundError as error:
            raise UsageError(f"show needs {error.name}, which is not installed: pip install 'lightning-ipu[cosmology]'") from None
        print(f"{path}: universe {given.get('index', 0)}, a slice at each redshift and the power spectrum beside theory")

    what = "Draw a simulated universe: a slice at each redshift, and its power spectrum beside linear theory."
    return program.other(words, prog="cosmoflow_ipu show", what=what, options=SHOW_OPTIONS, run=run)


def _data_options(given: dict[str, Any], options: tuple[Option, ...]) -> dict[str, Any]:
    return {key.removeprefix("data."): value for key, value in settings_of(given, options).items()}


def main(words: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    words = sys.argv[1:] if words is None else list(words)
    others = {"generate": _generate, "show": _show}
    if not words or words[0] not in (*SUBCOMMANDS, *others, "average"):
        words = with_named_config(words)
    return program.main(
        words,
        prog="cosmoflow_ipu",
        description=DESCRIPTION,
        epilog=EPILOG,
        options=OPTIONS,
        settle=settle,
        start=start,
        others=others,
        folder=CONFIGS,
        reads_config=False,
    )


if __name__ == "__main__":
    sys.exit(main())
