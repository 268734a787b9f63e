"""What a validation of CosmoFlow draws: predictions and truth, as they reach the picture."""

import tempfile
from typing import Any
from unittest.mock import patch

import torch
from runs import fit, loader
from torch.utils.data import TensorDataset

from cosmoflow_ipu import pictures
from cosmoflow_ipu.module import CosmoFlowModule

PLANS = {"replicas": {"R": 2}, "validated in stages": {"A": 2, "pipeline_splits": ["network.fc1"], "pipeline_validation": True}}


def run(devices: int, plan: str) -> dict[str, Any]:
    """Train for an epoch and validate 11 cubes: what is drawn, and the share of the variance that is logged."""
    torch.manual_seed(0)
    sizes = {"conv_size": 1, "n_conv_layers": 4, "fc1_size": 8, "fc2_size": 8}
    module = CosmoFlowModule(network="cosmoflow", **sizes, in_channels=1, standardise=False, report=True)
    generator = torch.Generator().manual_seed(4)
    cubes = torch.poisson(torch.ones(11, 1, 32, 32, 32), generator=generator).to(torch.int16)
    data = TensorDataset(cubes, 2 * torch.rand(11, 4, generator=generator) - 1)
    drawn: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, patch.object(pictures, "draw_predictions", lambda p, t, **_: drawn.update(p=p, t=t)):
        trainer = fit(module, loader(data, 2), loader(data, 2), devices=devices, default_root_dir=folder, **PLANS[plan])
    return {**drawn, "truth": data.tensors[1].double().numpy(), "r2": float(trainer.callback_metrics["val_r2"])}
