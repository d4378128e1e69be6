"""A Trainer that is about to run: its arguments, first batch and free memory, and a decision that all ranks share."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch.nn.parameter import is_lazy

from lightning_vram.argument_checks import check_kind
from lightning_vram.core.ranks import RankAgreement
from lightning_vram.estimation.batches import count_elements, read_first_batches
from lightning_vram.estimation.fake_trainer import RunCallbacks, isolated
from lightning_vram.estimation.traced_fit import FitRun
from lightning_vram.memory.device import accelerators
from lightning_vram.memory.estimate.device_spec import DeviceSpec, describe_this_device
from lightning_vram.memory.estimate.known_values import RecordedReads
from lightning_vram.memory.host import available_host_bytes
from lightning_vram.memory.units import parse_bytes, parse_limit
from lightning_vram.private_names.lightning import ddp_arguments, has_ddp_hook, mesh_sizes, notes_of_run, syncs_layers

AUTO = "auto"


def check_limit(name: str, limit: object) -> None:
    """Refuse what is no limit: ``"auto"``, bytes of 1 MiB or more, text with a unit, or a share above 0 up to 1."""
    if limit == AUTO:
        return
    check_kind(name, limit, int | float | str, "'auto', bytes, text such as '20GiB', or a share")
    if not isinstance(limit, float):
        parse_limit(limit, name)  # type: ignore[arg-type]
    elif not 0 < limit <= 1:
        raise ValueError(f"{name} as a share of the device must be above 0 and at most 1, got {limit}.")


def limit_bytes(name: str, limit: int | float | str, device: torch.device) -> int | None:
    """Return a limit in bytes; ``None``: there is none. Shares are of the device, or of what the host has available."""
    if limit == AUTO:
        return None
    if isinstance(limit, float):
        whole = accelerators.total_bytes(device) if accelerators.can_limit(device) else available_host_bytes() or 0
        return int(limit * whole)
    return parse_bytes(limit, name)


Decision = TypeVar("Decision")
_FIRST_BATCHES = 8
_BY_NAME = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


@dataclass(frozen=True)
class RunningTrainer:
    """A run that is about to begin, as an estimate of it wants it."""

    module: pl.LightningModule  # what it trains
    batch: Any  # its first one, or the one of the first that has the most elements
    device: DeviceSpec  # with what is left of it on the rank that has the least
    fit: FitRun  # how another Trainer runs the same step; what it did is known to all that share the Trainer
    num_devices: int  # on each node
    sizes: tuple[int, ...]  # elements of the first batches, as many as were read
    num_batches: int | None  # of the first epoch, on each rank; ``None``: unknown


def decide_together(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    limit: int | None,
    timeout: timedelta,
    decide: Callable[[Callable[[], RunningTrainer], int | None], Decision],
    *,
    run_callbacks: RunCallbacks,
) -> Decision:
    """Let rank zero decide, for the rank that has least free memory. A collective; ``decide`` must not raise."""
    device, free_bytes = trainer.strategy.root_device, None  # of which this process can have more
    if device.type != "cpu":
        free_bytes = accelerators.free_device_bytes(device)
    elif (available_bytes := available_host_bytes()) is not None:
        free_bytes = available_bytes // trainer.num_devices
    if free_bytes is not None:
        free_bytes += _bytes_on(device, module)
        free_bytes = free_bytes if limit is None else min(free_bytes, limit)
    ranks = RankAgreement(timeout)
    try:
        known = [one for one in ranks.gather(free_bytes) if one is not None]
        decision: Decision | None = None
        if trainer.is_global_zero:
            decision = decide(lambda: _read(trainer, module, known, run_callbacks), min(known, default=None))
        return ranks.gather(decision)[0]  # type: ignore[no-any-return]
    finally:
        ranks.close()


def bytes_of_others(trainer: pl.Trainer, module: pl.LightningModule) -> int:
    """Return what is allocated on the device of a run before it begins, in addition to the module."""
    device = trainer.strategy.root_device
    if not accelerators.has_cache(device):
        return 0
    return accelerators.read_allocator(device).allocated_bytes - _bytes_on(device, module)


def forget_shared(trainer: pl.Trainer) -> None:
    """Free what those that decide share. To be called when the run begins."""
    notes_of_run(trainer).clear()


def _read(
    trainer: pl.Trainer, module: pl.LightningModule, free_bytes: list[int], run_callbacks: RunCallbacks
) -> RunningTrainer:
    device = trainer.strategy.root_device
    if not free_bytes:
        raise ValueError(f"device '{device}' does not report its free memory")
    shared = notes_of_run(trainer)
    if not shared:
        with isolated(is_connected=True):  # samplers may ask for the rank
            batches, num_batches = read_first_batches(trainer, module, _FIRST_BATCHES)
        if num_batches is not None:
            num_batches = -(-num_batches // trainer.world_size)  # of a sampler that Lightning makes
        steps = trainer.max_steps * trainer.accumulate_grad_batches
        if steps > 0:
            num_batches = steps if num_batches is None else min(num_batches, steps)
        shared["data"] = {
            "batch": max(batches, key=count_elements),
            "sizes": tuple(map(count_elements, batches)),
            "num_batches": num_batches,
        }
        shared["fit"] = {"known": [], "reads": RecordedReads()}
    spec = describe_device(device, min(free_bytes))
    fit = FitRun(
        read_trainer_arguments(trainer),
        None if spec.name == "cpu" else spec,
        num_ranks=trainer.num_devices * trainer.num_nodes,
        with_times=True,
        run_callbacks=run_callbacks,
        **shared["fit"],
    )
    return RunningTrainer(module, device=spec, fit=fit, num_devices=trainer.num_devices, **shared["data"])


def describe_device(device: torch.device, num_bytes: int) -> DeviceSpec:
    """Describe what is left of a device. Its driver has taken its own part by now."""
    memory_bytes = max(1, num_bytes)
    if device.type == "cpu":
        return DeviceSpec("cpu", memory_bytes)
    return replace(describe_this_device(device.type), name=str(device), memory_bytes=memory_bytes, context_bytes=0)


def _bytes_on(device: torch.device, module: pl.LightningModule) -> int:
    tensors = (one for one in (*module.parameters(), *module.buffers()) if one.device == device and not is_lazy(one))
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def read_trainer_arguments(trainer: pl.Trainer) -> dict[str, Any]:
    """Return arguments for another Trainer, which runs the same step; callbacks and plugins are to be copied."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    arguments: dict[str, Any] = {
        "callbacks": list(trainer.callbacks),  # type: ignore[attr-defined]
        "strategy": _another(trainer.strategy),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "inference_mode": trainer.fit_loop.epoch_loop.val_loop.inference_mode,
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled() and (not warns or "warn"),
        "sync_batchnorm": syncs_layers(trainer.strategy),
    }
    plugin = trainer.precision_plugin
    return arguments | ({"precision": plugin.precision} if type(plugin) in _BY_NAME else {"plugins": [plugin]})


class _OtherDDP(DDPStrategy):
    """A subclass, or one with a communication hook: what it does with gradients is not known."""


def _another(strategy: Strategy) -> Strategy | str:
    if hasattr(strategy, "make_again"):  # of fsdp_offload
        return strategy.make_again()  # type: ignore[no-any-return]
    if isinstance(strategy, SingleDeviceStrategy):
        return "auto"
    if isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy):  # a subclass
        kind = DDPStrategy if type(strategy) is DDPStrategy and not has_ddp_hook(strategy) else _OtherDDP
        return kind(**copy.deepcopy(ddp_arguments(strategy)))
    if isinstance(strategy, ModelParallelStrategy):
        return ModelParallelStrategy(**mesh_sizes(strategy))
    raise ValueError(f"{type(strategy).__name__} is not supported")
