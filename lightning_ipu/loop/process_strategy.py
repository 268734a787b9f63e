"""Lightning's DDPStrategy as far as it is used: how many processes there are, who starts them, where they meet, and which plugins they use."""

from __future__ import annotations

import atexit
import os
from typing import Any, Literal

from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.plugins import CheckpointIO, ClusterEnvironment, Precision
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy
from typing_extensions import override

from lightning_ipu import machine
from lightning_ipu.loop import environment
from lightning_ipu.loop.checkpoint_io import completed
from lightning_ipu.loop.launcher import Launcher, check_can_start_again
from lightning_ipu.placement import Placement
from lightning_ipu.plan import Plan
from lightning_ipu.precision.plugin import in_place_of


class ProcessStrategy(DDPStrategy):
    """A strategy of several processes, each on its own device, without DDP's wrapper of the module.

    Args:
        plan: whose replicas and stages the processes share out.
        loss_scaling, stochastic_rounding: of the precision plugin.
        arguments: of DDPStrategy.
    """

    def __init__(self, *, plan: Plan, loss_scaling: float | Literal["auto"] | None, stochastic_rounding: bool, **arguments: Any) -> None:
        self.plan, self.loss_scaling, self.stochastic_rounding = plan, loss_scaling, stochastic_rounding
        super().__init__(**arguments)

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """None until the Trainer has found one. It asks for it before it looks for launchers: then variables that other runs left are removed."""
        if self._cluster_environment is None:
            machine.forget_leftovers()
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        self._cluster_environment = environment

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Take Lightning's plugin; one that computes in 16 bits is exchanged for ours, under the same name of precision."""
        on_cpu = isinstance(self.accelerator, CPUAccelerator)
        plugin = in_place_of(plugin, on_cpu=on_cpu, loss_scaling=self.loss_scaling, stochastic_rounding=self.stochastic_rounding)
        self._precision_plugin = plugin

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = completed(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def process_count(self) -> int:
        """Processes of the run, on all nodes."""
        return max(1, self.num_nodes * self.num_processes)

    @property
    def synchronizes_layers(self) -> bool:
        """Whether the Trainer was told to exchange BatchNorm for SyncBatchNorm."""
        return self._layer_sync is not None

    @override
    def set_world_ranks(self) -> None:
        """Called first when the Trainer is made: settle how many processes there are. torchrun's number goes before the Trainer's."""
        if isinstance(self.cluster_environment, TorchElasticEnvironment):
            local, world = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), self.cluster_environment.world_size()
            first = self.parallel_devices[0]
            self.parallel_devices = [first] * local if first.type == "cpu" else self.parallel_devices[:local]
            self.num_nodes = world // local
        self.cluster_environment = environment.chosen_environment(
            self.cluster_environment, processes=self.process_count, nodes=self.num_nodes
        )
        super().set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        self._launcher = None
        Placement(plan=self.plan, processes=self.process_count)  # before any is started
        if self.process_count > 1:
            environment.refuse_leftovers(self.cluster_environment)
            if not self.cluster_environment.creates_processes_externally:
                check_can_start_again(self.num_processes)
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def meet(self) -> None:
        """Wait for the other processes of the run, and leave them in good order at the program's end."""
        with self._launcher.meeting():
            environment.meet_apart_from_earlier_attempts(
                self.cluster_environment, backend=self._get_process_group_backend(), timeout=self._timeout
            )
            self.setup_distributed()
        atexit.unregister(environment.leave_process_group)
        atexit.register(environment.leave_process_group)
