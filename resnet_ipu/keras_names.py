"""The layers' names in Graphcore's TensorFlow 2 program, and where a pipeline stage that begins with one of them begins here.

| its layer | stage here begins with |
|---|---|
| `conv1_bn`, `conv1_relu`, `pool1_pad`, `pool1_pool` | `network.bn1`, `network.relu`, `network.maxpool` (twice) |
| `conv{s}_block{b}_0_conv`, `_0_bn`, `..._shortcut` | `.downsample` of the block, `.downsample.0`, `.downsample.1` |
| `conv{s}_block{b}_{k}_conv`, `_{k}_bn`, `..._layer{k}_conv`, `_layer{k}_conv_ds`, `_layer{k}_bn` | the block's `.conv{k}`, `.bn{k}`; its first convolution is the block itself |
| `conv{s}_block{b}_{k}_relu`, `..._layer{k}_relu` | its `.conv{k+1}`: one ReLU serves a whole block here |
| `conv{s}_block{b}_add`, `_out`, `_post_addition_relu` | the next block; after the last one `network.avgpool` |
| `avg_pool`; `predictions`, `fc_layer` | `network.avgpool`; `network.fc` |
| toy models: `conv2d_0`, `conv2d_1`, `flatten` | the same in `network` |

Block b of conv{s}, both counted as there, is `network.layer{s-1}.{b-1}`. Where a stage begins moves no number; sums and ReLUs that the
original has at the start of a stage are at the end of the one before.
"""

from __future__ import annotations

import re

_IMAGENET_BLOCKS = {"18": (2, 2, 2, 2), "34": (3, 4, 6, 3), "50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}
_OF_THE_NETWORK = {
    "conv1_bn": "bn1",
    "conv1_relu": "relu",
    "pool1_pad": "maxpool",
    "pool1_pool": "maxpool",
    "avg_pool": "avgpool",
    "predictions": "fc",
    "fc_layer": "fc",
}
_OF_A_TOY = ("conv2d_0", "conv2d_1", "flatten")


def blocks_of(size: str) -> tuple[int, ...]:
    """Blocks in each stack of a network; none in a toy model."""
    if size.startswith("toy"):
        return ()
    if (number := size.removeprefix("x")) in _IMAGENET_BLOCKS:
        return _IMAGENET_BLOCKS[number]
    return ((int(size) - 2) // 6,) * 3


def module_name(layer: str, size: str) -> str | None:
    """The submodule with which a stage begins that begins with `layer` there; None for a name that is not one of the program's.

    Args:
        layer: name in the TensorFlow 2 program.
        size: the network, as in `--size`.

    Raises:
        ValueError: a name of that form that the network does not have.
    """
    blocks = blocks_of(size)
    if not blocks:
        return f"network.{layer}" if layer in _OF_A_TOY else None
    if layer in _OF_THE_NETWORK:
        return f"network.{_OF_THE_NETWORK[layer]}"
    match = re.fullmatch(r"conv(\d+)_block(\d+)_(.+)", layer)
    if match is None:
        return None
    stack, block, part = int(match[1]) - 1, int(match[2]) - 1, match[3]
    if not (1 <= stack <= len(blocks) and 0 <= block < blocks[stack - 1]):
        stacks = ", ".join(f"conv{number}_block1 to {count}" for number, count in enumerate(blocks, start=2))
        raise ValueError(f"{layer}: there is no such block; there are {stacks}")
    here = f"network.layer{stack}.{block}"
    if part in ("add", "out", "post_addition_relu"):
        if block + 1 < blocks[stack - 1]:
            return f"network.layer{stack}.{block + 1}"
        return f"network.layer{stack + 1}.0" if stack < len(blocks) else "network.avgpool"
    if part in ("0_conv", "0_bn", "shortcut"):
        return here + {"0_conv": ".downsample.0", "0_bn": ".downsample.1", "shortcut": ".downsample"}[part]
    inner = re.fullmatch(r"(?:layer)?(\d)_(conv|conv_ds|bn|relu)", part)
    of_block = (1, 2) if size in ("18", "34") or len(blocks) == 3 else (1, 2, 3)
    if inner is None or (number := int(inner[1])) not in of_block or inner[2] == "relu" and number == of_block[-1]:
        raise ValueError(f"{layer}: block {block + 1} of conv{stack + 1} has no such layer")
    if inner[2] == "relu":
        return f"{here}.conv{number + 1}"
    if inner[2] == "bn":
        return f"{here}.bn{number}"
    return here if number == 1 else f"{here}.conv{number}"
