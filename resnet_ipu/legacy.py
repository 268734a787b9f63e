"""Words of the original programs: options that are carried out under other names, and those that are refused."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

from lightning_ipu.command import readers
from lightning_ipu.command.options import RUN, Option, UsageError
from lightning_ipu.command.readers import positive
from lightning_ipu.command.rows import DATA, NETWORK, PLAN, TRAINING
from resnet_ipu.keras_names import module_name


def norm_layer(text: str) -> dict[str, Any]:
    """The original's dictionary of a norm layer, in YAML or JSON."""
    import yaml

    try:
        layer = yaml.load(text, yaml.CSafeLoader)
    except yaml.YAMLError:
        layer = None
    if not isinstance(layer, dict) or not isinstance(layer.get("name"), str):
        raise ArgumentTypeError(f"{text!r} must be a dictionary such as '{{name: custom_batch_norm, momentum: 0.97}}'")
    legal = {"custom_batch_norm": ["momentum"], "batch_norm": ["momentum"], "group_norm": ["num_groups"]}
    if layer["name"] not in legal:
        raise ArgumentTypeError(f"name: {layer['name']!r} is not known; known are {', '.join(legal)}")
    if "channels_per_group" in layer:
        raise ArgumentTypeError("channels_per_group: all norms here have the same number of groups; give num_groups")
    for key in layer:
        if key not in ["name", *legal[layer["name"]]]:
            raise ArgumentTypeError(f"{key} means nothing to {layer['name']}, which takes {', '.join(legal[layer['name']])}")
    if layer["name"] == "group_norm" and not isinstance(layer.get("num_groups"), int):
        raise ArgumentTypeError("group_norm needs num_groups")
    if not 0 <= (momentum := layer.get("momentum", 0)) < 1:
        raise ArgumentTypeError(f"momentum: {momentum} must be at least 0 and below 1")
    return layer


_COMPILER = "steers the IPU's compiler only and changes nothing here"

LEGACY_OPTIONS = (
    Option(name="--norm-layer", group=NETWORK, type=norm_layer, metavar="DICT", excludes=("--norm-type", "--norm-momentum", "--norm-groups"), help="--norm-type, --norm-momentum and --norm-groups at once, as in '{name: custom_batch_norm, momentum: 0.97}'; batch_norm's momentum is that of a micro-batch", original=True),
    Option(name="--eight-bit-transfer", group=DATA, type=bool, shown="true", help="bring images to the device as uint8 and normalise them there", original=True),
    Option(name="--prng", group=PLAN, type=bool, shown="true", help="stochastic rounding of weight updates in 16.16: a change below the spacing of 16-bit numbers, 1/256 of a weight in bf16, is made at times instead of never", original=True),
    Option(name="--base-learning-rate", group=TRAINING, type=int, excludes="--learning-rate", help="exponent N: the learning rate is 2^N x the value of --batch-size", original=True),
    Option(name="--initial-learning-rate", group=TRAINING, type=positive(float), metavar="X", excludes=("--learning-rate", "--base-learning-rate"), help="the learning rate is X times the samples of a weight update", original=True),
    Option(name="--learning-rate-decay", group=TRAINING, type=readers.numbers, metavar="X,...", shown="1,0.1,0.01", help="multipliers of a stepped schedule; this or --learning-rate-schedule selects it, as --lr-schedule stepped does", original=True),
    Option(name="--learning-rate-schedule", group=TRAINING, type=readers.numbers, metavar="X,...", shown="0.5,0.75", help="shares of the run after which the next multiplier of --learning-rate-decay holds", original=True),
    Option(name="--weight-updates-per-epoch", group=TRAINING, type=positive(), shown="all that the training set has", excludes="--limit-train-batches", help="end every epoch after N weight updates", original=True),
    Option(name="--no-validation", group=TRAINING, type=bool, help="the same as --validation false", original=True),
    Option(name="--log-dir", group=RUN, type=readers.path, metavar="DIR", excludes="--output-dir", help="the original's word for --output-dir", original=True),
    Option(name="--log_dir_string", group=RUN, type=readers.path, metavar="NAME", help="put the output into this sub-directory of --output-dir", original=True),
    Option(name="--fp-exceptions", group="", refused="an IPU's floating-point exceptions do not exist here; fit --trainer.detect_anomaly true stops at the first NaN in a gradient"),
    Option(name="--half-partials", group="", refused="16-bit partial sums are an IPU's; sums are kept in 32 bits here"),
    Option(name="--simulation", group="", refused="simulates an IPU's tiles; here the plan runs on the device that is there"),
    Option(name="--ckpt", group="", refused="checkpoints go to OUTPUT_DIR/checkpoints, last.ckpt being the latest; choose the place with --output-dir"),
    Option(name="--syncless-collectives", group="", refused=_COMPILER),
    Option(name="--max-bytes-per-tile", group="", refused=_COMPILER),
    Option(name="--get-reports", group="", refused="the reports of an IPU's compiler do not exist here (the original ignored this option)"),
)  # fmt: skip


def with_norm_layer(given: dict[str, Any]) -> dict[str, Any]:
    """The options with the original's dictionary of a norm layer as options of its own."""
    if "norm_layer" not in given:
        return given
    given = dict(given)
    layer = given.pop("norm_layer")
    if layer["name"] == "group_norm":
        return {**given, "norm_type": "group", "norm_groups": layer["num_groups"]}
    if layer["name"] == "custom_batch_norm":
        return {**given, "norm_type": "batch", "norm_momentum": layer.get("momentum", 0.97)}
    return {**given, "norm_type": "batch", "micro_batch_momentum": layer.get("momentum", 0.99)}


def with_opposites(given: dict[str, Any]) -> dict[str, Any]:
    """The options with the false of a word that is on by itself as its opposite: --prng false is --no-prng."""
    return given | {f"no_{name}": True for name in ("prng", "eight_bit_transfer") if given.get(name) is False}


def split_names(splits: list[str], size: str) -> list[str]:
    """Submodules that begin a stage, where the original's names of layers were given."""
    try:
        return [module_name(split, size) or split for split in splits]
    except ValueError as error:
        raise UsageError(f"--pipeline-splits {error}") from None
