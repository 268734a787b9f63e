"""What optimizers need beyond torch's own: which parameters decay."""

from typing import Any

from torch import nn


def parameter_groups(module: nn.Module, *, weight_decay: float, decay_all: bool = False) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer in which norms and biases do not decay.

    Args:
        module: its trainable parameters are grouped; frozen ones are left out.
        weight_decay: decay of the weights of convolutions and linear layers: every tensor of two or more dimensions.
        decay_all: decay the one-dimensional tensors, the weights of norms and all biases, as well.

    Returns:
        The decaying group, then the other; a group without parameters is left out.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    decaying = [parameter for parameter in parameters if decay_all or parameter.ndim > 1]
    others = [parameter for parameter in parameters if not decay_all and parameter.ndim <= 1]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
