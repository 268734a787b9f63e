"""Volumes of particle counts with the parameters of their universes: simulated here, or read from CosmoFlow's TFRecord files."""

from cosmoflow_ipu.data.cache import CubeCache
from cosmoflow_ipu.data.dataset import CubeDataset, DummyDataset, turn
from cosmoflow_ipu.data.files import CHANNELS, SPLITS, CosmoDataError, find_files, read_cube, sample_size_of, universe_of
from cosmoflow_ipu.data.module import CosmoFlowDataModule
from cosmoflow_ipu.data.simulate import write_universes

__all__ = [
    "CHANNELS", "SPLITS", "CosmoDataError", "CosmoFlowDataModule", "CubeCache", "CubeDataset", "DummyDataset", "find_files", "read_cube",
    "sample_size_of", "turn", "universe_of", "write_universes",
]  # fmt: skip
