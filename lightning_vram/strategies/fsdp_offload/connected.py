"""Processes of a run: how they connect, and name a lost one."""

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous
from typing_extensions import override

from lightning_vram.callbacks.slurm_requeue import SlurmJob, check_job, check_tasks
from lightning_vram.core.processes import leave_group_at_exit
from lightning_vram.core.ranks import attempt_store, naming_lost_peers
from lightning_vram.private_names.lightning import (
    PlainStrategy,
    ScriptLauncher,
    find_trainer,
    make_script_launcher,
    reduce_over_ranks,
)


def default_backend(device: torch.device) -> str:
    """Choose the backend for training on ``device``, with gloo for tensors on the host."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def connect(cluster_environment: ClusterEnvironment, backend: str, *, timeout: timedelta, device: torch.device) -> None:
    """Create the process group of all ranks, unless there is one. A collective.

    It is destroyed at exit without a barrier: a rank does not wait for one that died. NCCL connects at once, so network
    errors are raised here and not in the first collective.
    """
    if dist.is_initialized():
        return
    rank, world_size = cluster_environment.global_rank(), cluster_environment.world_size()
    os.environ["MASTER_ADDR"] = cluster_environment.main_address
    os.environ["MASTER_PORT"] = str(cluster_environment.main_port)
    with naming_lost_peers(rank, world_size, lambda: "making the process group"):
        store, *_ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        store = attempt_store(store, rank, world_size, timeout)
        device_id = None if device.type == "cpu" else device
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
        )
    leave_group_at_exit()
    rank_zero_info(f"All {world_size} processes are connected, over {backend}.")


class ConnectedStrategy(PlainStrategy):
    """A strategy with one process per device, in one mesh.

    ``given``: accelerator, devices, environment and plugins, set by the Trainer.
    """

    def __init__(self, arguments: SimpleNamespace, *given: Any) -> None:
        self.arguments = arguments
        super().__init__(*given)
        self.num_nodes = 1
        self.process_group_backend: str | None = arguments.process_group_backend
        self._mesh: DeviceMesh | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether data is split over ranks; with one rank, samplers are unchanged."""
        return self.num_nodes * self.num_processes > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def device_mesh(self) -> DeviceMesh:
        """Mesh of all ranks: ``shard``, or ``replicate`` and ``shard``."""
        if self._mesh is None:
            raise RuntimeError("FSDPOffloadStrategy.device_mesh exists once the processes have connected.")
        return self._mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def make_launcher(self) -> ScriptLauncher | None:
        assert self.cluster_environment is not None
        # A launcher would change the threads of a single process, and so the order of sums.
        if not self.is_distributed or self.cluster_environment.creates_processes_externally:
            return None
        return make_script_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        check_job(SlurmJob.from_environment())
        check_tasks(self.cluster_environment, self.num_processes, self.num_nodes)
        super().setup_environment()
        assert self.cluster_environment is not None
        self.set_world_ranks()
        if self.world_size > 1:  # a run on one rank draws the same numbers as the baseline
            reset_seed()
        backend = self.process_group_backend = self.process_group_backend or default_backend(self.root_device)
        if self.arguments.offload != "none" and "gloo" not in backend:
            raise ValueError(
                f"FSDPOffloadStrategy(process_group_backend={backend!r}) has no backend for host tensors: use "
                "'cpu:gloo,cuda:nccl', or leave it out."
            )
        with self._named("setup"):
            connect(self.cluster_environment, backend, timeout=self.arguments.timeout, device=self.root_device)
            self._mesh = self._make_mesh()

    def set_world_ranks(self) -> None:
        """Set the rank in the environment and for loggers."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _make_mesh(self) -> DeviceMesh:
        kind, size = self.root_device.type, self.world_size
        if dist.get_world_size() != size:
            raise RuntimeError(
                f"This process is still connected to {dist.get_world_size()} ranks, but trains on {size}. Train in a "
                "new process, or call torch.distributed.destroy_process_group() first."
            )
        if self.arguments.shard != "hybrid":
            return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
        replicas = self.arguments.data_parallel_replicate_size or self.num_nodes
        if size % replicas:
            raise ValueError(
                f"FSDPOffloadStrategy(data_parallel_replicate_size={replicas}) must divide the number of processes, "
                f"{size}."
            )
        return init_device_mesh(kind, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            with self._named("barrier"):
                dist.barrier(device_ids=None if self.root_device.type == "cpu" else [self.root_device.index])

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        objects = [obj]
        if dist.is_initialized():
            with self._named("broadcast"):
                dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        with self._named("reduce"):
            return reduce_over_ranks(tensor, group, reduce_op)

    @property
    def _trainer(self) -> pl.Trainer | None:
        return None if self.lightning_module is None else find_trainer(self.lightning_module)

    def _named(self, phase: str) -> naming_lost_peers:
        """Name step and phase in errors about a lost rank."""
        return naming_lost_peers(self.global_rank, self.world_size, lambda: f"step {self._count_steps()}, {phase}")

    def _count_steps(self) -> int:
        return self._trainer.global_step if self._trainer is not None else 0
