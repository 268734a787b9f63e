"""What type checkers know of the names that the package loads when they are first used."""

from cosmoflow_ipu.data.module import CosmoFlowDataModule as CosmoFlowDataModule
from cosmoflow_ipu.data.simulate import write_universes as write_universes
from cosmoflow_ipu.module import CosmoFlowModule as CosmoFlowModule
from cosmoflow_ipu.networks import CosmoFlow as CosmoFlow
from cosmoflow_ipu.networks import CosmoResNet as CosmoResNet
from cosmoflow_ipu.networks import cosmoflow as cosmoflow
from cosmoflow_ipu.universe import Universes as Universes
from cosmoflow_ipu.universe import power_spectrum as power_spectrum
