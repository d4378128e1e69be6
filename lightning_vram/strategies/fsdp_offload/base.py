"""The processes of a run, its steps on a sharded module, and what is patched in Lightning for them."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.callbacks.hook_points import is_scaled, why_not_early
from lightning_vram.callbacks.slurm_requeue import SlurmJob, check_job, check_tasks
from lightning_vram.core.gradients import clip_sharded_values
from lightning_vram.core.patching import MethodPatch, replace_by, without_fast_path
from lightning_vram.core.processes import leave_group_at_exit
from lightning_vram.core.ranks import check_store, naming_lost_peers
from lightning_vram.memory.units import format_bytes
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.optimizers.step_round import iterate_parameters
from lightning_vram.private_names import lightning as private_lightning
from lightning_vram.techniques.sharding import FirstStepMemory, FullSharding


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
    check_store()
    rank, world_size = cluster_environment.global_rank(), cluster_environment.world_size()
    os.environ["MASTER_ADDR"] = cluster_environment.main_address
    os.environ["MASTER_PORT"] = str(cluster_environment.main_port)
    with naming_lost_peers(rank, world_size, lambda: "making the process group"):
        device_id = None if device.type == "cpu" else device
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id)
    leave_group_at_exit()
    rank_zero_info(f"All {world_size} processes are connected, over {backend}.")


class BaseStrategy(private_lightning.PlainStrategy):
    """A strategy with one process per device, in one mesh, and its steps; ``given``: what the Trainer sets."""

    def __init__(self, arguments: SimpleNamespace, *given: Any) -> None:
        self.arguments = arguments
        super().__init__(*given)
        self.num_nodes = 1
        self.process_group_backend: str | None = arguments.process_group_backend
        self._mesh: DeviceMesh | None = None
        self._sharding: FullSharding | None = None
        self._first_step: FirstStepMemory | None = None  # for device_bytes="auto", until it is measured

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
    def make_launcher(self) -> private_lightning.ScriptLauncher | None:
        assert self.cluster_environment is not None
        # A launcher would change the threads of a single process, and so the order of sums.
        if not self.is_distributed or self.cluster_environment.creates_processes_externally:
            return None
        return private_lightning.make_script_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

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
                f"FSDPOffloadStrategy(data_parallel_replicate_size={replicas}) must divide the {size} processes."
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
            return private_lightning.reduce_over_ranks(tensor, group, reduce_op)

    @property
    def _trainer(self) -> pl.Trainer | None:
        return None if self.lightning_module is None else private_lightning.find_trainer(self.lightning_module)

    def _named(self, phase: str) -> naming_lost_peers:
        """Name step and phase in errors about a lost rank."""

        def describe() -> str:
            return f"step {0 if self._trainer is None else self._trainer.global_step}, {phase}"

        return naming_lost_peers(self.global_rank, self.world_size, describe)

    # --- steps ---

    def _run_step(self, name: str, context: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a step within the forward of the root, where FSDP2 gathers what no layer gathers for itself."""
        assert self._sharding is not None
        fast_path = nullcontext() if self.root_device.type == "cuda" else without_fast_path()
        in_precision = getattr(self.precision_plugin, context)()
        with self._named(name), in_precision, fast_path, self._sharding.inside_step():
            return self.run_in_forward(name, *args, **kwargs)

    training_step = partialmethod(_run_step, "training_step", "train_step_context")
    validation_step = partialmethod(_run_step, "validation_step", "val_step_context")
    test_step = partialmethod(_run_step, "test_step", "test_step_context")
    predict_step = partialmethod(_run_step, "predict_step", "predict_step_context")

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(closure_loss, DTensor):
            raise RuntimeError(
                f"{type(self).__name__}: the loss uses parameters of a layer outside its forward, where they are "
                "sharded. Compute this term, such as a weight penalty, inside the layer, or exclude the layer with "
                "`wrap`: excluded layers are whole during the whole step."
            )
        with self._named("backward"):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self._named("optimizer step"):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        num_bytes = self._first_step.note_step(optimizer) if self._first_step is not None else None
        if num_bytes is not None:
            self._first_step = None
            rank_zero_info(f"fsdp_offload keeps a copy of weights on the device, {format_bytes(num_bytes)} on rank 0.")
        return result


def patch_trainer(trainer: pl.Trainer, optimizers: HostOptimizers, sharding: FullSharding) -> list[MethodPatch]:
    """Make clipping, ``toggle_optimizer`` and ``log`` work on shards; steps are early where nothing reads gradients."""
    module, precision = trainer.lightning_module, trainer.precision_plugin
    optimizers.may_step_early = make_early(trainer)

    # for any plugin, on the local gradients: the dispatch of DTensor takes longer than the arithmetic
    def clip_norm(optimizer: Optimizer, clip_val: float) -> None:
        optimizers.clip_norm(optimizer, clip_val, may_wait=may_clip_late(trainer))

    def clip_value(optimizer: Optimizer, clip_val: float) -> None:
        clip_sharded_values(iterate_parameters(optimizer), clip_val)

    def follow(toggle: Callable[..., None]) -> Callable[..., None]:
        def toggle_gathered(*args: Any, **kwargs: Any) -> None:
            toggle(*args, **kwargs)
            sharding.agree_on_gradients()

        return toggle_gathered

    def take_numbers(log: Callable[..., None]) -> Callable[..., None]:
        def log_number(name: str, value: Any, *args: Any, **kwargs: Any) -> None:  # it could not add up sharded tensors
            log(name, value.item() if isinstance(value, DTensor) else value, *args, **kwargs)

        return log_number

    return [
        MethodPatch(precision, "clip_grad_by_norm", replace_by(clip_norm)),
        MethodPatch(precision, "clip_grad_by_value", replace_by(clip_value)),
        MethodPatch(module, "toggle_optimizer", follow),
        MethodPatch(module, "untoggle_optimizer", follow),
        MethodPatch(module, "log", take_numbers),
    ]


def make_early(trainer: pl.Trainer) -> Callable[[Callable[[], Any]], bool]:
    """Return whether a step may begin in its closure: no code reads gradients afterwards; tell once why not."""
    told: list[str] = []

    def may_step_early(closure: Callable[[], Any]) -> bool:
        why = _why_late(trainer, closure)
        if why is not None and not told:
            told.append(why)
            rank_zero_info(
                "fsdp_offload steps the optimizer after the backward instead of layer by layer within it, because of "
                f"{why}: the step overlaps only with the next forward."
            )
        return why is None

    return may_step_early


def _why_late(trainer: pl.Trainer, closure: Callable[[], Any]) -> str | None:
    if not trainer.lightning_module.automatic_optimization:
        return "manual optimization"
    if trainer.gradient_clip_val:
        return f"gradient_clip_val={trainer.gradient_clip_val}"
    if is_scaled(trainer):
        return "the GradScaler"
    return "detect_anomaly" if torch.is_anomaly_enabled() else why_not_early(trainer, closure)


def may_clip_late(trainer: pl.Trainer) -> bool:
    """Whether no code reads gradients between the current clipping and the step."""
    module = trainer.lightning_module
    name = "configure_gradient_clipping"  # in another hook the module may use gradients afterwards
    return (
        module.automatic_optimization
        and private_lightning.runs_in_hook(module, name)
        and not (is_overridden(name, module) or is_scaled(trainer))
    )
