"""The processes of a run: how many there are, who starts them, where they meet, and how they disconnect."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.plugins import ClusterEnvironment
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment
from typing_extensions import override

from lightning_ipu import machine
from lightning_ipu.engine.processes import process_groups
from lightning_ipu.loop.launcher import let_signals_end
from lightning_ipu.loop.undo import Undo
from lightning_ipu.plan import PlanError


class OneProcess(LightningEnvironment):
    """The cluster environment of a single process: rank 0, whatever variables another run has left."""

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0


def chosen_environment(environment: ClusterEnvironment, *, processes: int, nodes: int) -> ClusterEnvironment:
    """The cluster environment for so many processes on so many nodes, given the one that Lightning has detected.

    Raises:
        PlanError: srun has started another number of processes.
    """
    if isinstance(environment, SLURMEnvironment):
        if machine.launcher() != "srun" or environment.world_size() == 1:
            environment = LightningEnvironment()  # inside an allocation, but not one of several that srun started
        elif environment.world_size() != processes:
            raise PlanError(
                f"srun started {environment.world_size()} processes (SLURM_NTASKS), but devices x num_nodes is {processes}: they must"
                " be the same"
            )
    if type(environment) is LightningEnvironment and nodes == 1 and "LOCAL_RANK" not in os.environ:
        for variable in ("NODE_RANK", "GROUP_RANK", "MASTER_ADDR"):  # they name other nodes, and this run has none
            os.environ.pop(variable, None)
    if processes == 1 and type(environment) is LightningEnvironment:
        environment = OneProcess()
    return environment


def leave_samplers_alone(trainer: Trainer, undo: Undo) -> None:
    """The order of samples is the strategy's: Lightning would shuffle every training loader, even in one process."""
    undo.exchange(trainer._accelerator_connector, "use_distributed_sampler", False)


def refuse_leftovers(environment: ClusterEnvironment) -> None:
    """Refuse to wait for processes that nobody starts: LOCAL_RANK left over in the environment, without an address to meet at."""
    alone = isinstance(environment, LightningEnvironment) and "LOCAL_RANK" in os.environ and "MASTER_ADDR" not in os.environ
    if alone:
        raise PlanError(
            f"LOCAL_RANK={os.environ['LOCAL_RANK']} is set in the environment, but no MASTER_ADDR: it looks left over from another run."
            " Unset LOCAL_RANK to have the processes started, or set MASTER_ADDR and MASTER_PORT if you start them yourself"
        )


def meet_apart_from_earlier_attempts(environment: ClusterEnvironment, *, backend: str, timeout: timedelta) -> None:
    """After a restart by torchrun, let the processes find each other under names of their own.

    torchrun's store lives on, and with it the addresses of the processes that have ended (seen with torch 2.14: whoever reads an old
    one waits for ever, or is refused).
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or torch.distributed.is_initialized():
        return
    store = torch.distributed.TCPStore(environment.main_address, environment.main_port, is_master=False, timeout=timeout)
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore(f"attempt {attempt}", store),
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=timeout,
    )


def leave_process_group() -> None:
    """At the program's end, before Python shuts down: let gloo's threads release the tensors of the last message.

    For that they need Python's lock. A thread that asks for it while Python shuts down ends the program with an abort (pytorch
    issue 190489; seen with torch 2.14 after a run that had succeeded). Destroying the group joins its threads unless somebody still
    refers to it, so they are given a moment as well.
    """
    let_signals_end()
    process_groups.cache_clear()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    time.sleep(0.1)
