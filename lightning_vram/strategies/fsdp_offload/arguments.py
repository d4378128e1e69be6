"""Arguments of ``FSDPOffloadStrategy``, and what it refuses before training, the same on every rank."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_vram.argument_checks import check_bool, check_positive_int
from lightning_vram.memory.device.accelerators import has_cache
from lightning_vram.memory.units import parse_bytes
from lightning_vram.optimizers.moment_forms import HostState
from lightning_vram.precision import LeanMixedPrecision

Master = Literal["fp32", "split"]
Offload = Literal["params", "optimizer", "none"]
OffloadPart = Literal["parameters", "gradients", "optimizer"]
DeviceBytes = int | float | str | None
Shard = Literal["full", "grad_op", "hybrid"]
StateDictType = Literal["full", "sharded"]
Wrap = str | Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
NAME = "FSDPOffloadStrategy"
_CHOICES: dict[str, Any] = {
    "offload": Offload,
    "master": Master,
    "host_state": HostState,
    "shard": Shard,
    "state_dict_type": StateDictType,
}
_PARTS: dict[frozenset[str], Offload] = {
    frozenset(("parameters", "gradients", "optimizer")): "params",
    frozenset(("gradients", "optimizer")): "optimizer",
    frozenset(): "none",
}


@dataclass(frozen=True)
class OffloadArguments:
    """Checked arguments of the strategy."""

    offload: Offload
    device_bytes: DeviceBytes
    master: Master
    host_state: HostState
    shard: Shard
    wrap: Wrap
    min_params: int
    data_parallel_replicate_size: int | None
    reshard_after_forward: bool
    pin_memory: bool | None
    nvme_path: Path | None
    cpu_threads: int | None
    bind_to_numa_node: bool | None
    narrow_transfers: bool
    state_dict_type: StateDictType
    async_save: bool
    verify: bool
    init_on_meta: bool
    timeout: timedelta


def check_arguments(**given: Any) -> OffloadArguments:
    """Check each argument, and combinations."""
    given["offload"] = _read_offload(given["offload"])
    for key, kind in _CHOICES.items():
        if given[key] not in get_args(kind):
            raise ValueError(
                f"{NAME}({key}) must be one of {', '.join(map(repr, get_args(kind)))}, got {given[key]!r}."
            )
    _check_wrap(given["wrap"])
    check_positive_int(f"{NAME}(min_params)", given["min_params"])
    for key in ("cpu_threads", "data_parallel_replicate_size"):
        if given[key] is not None:
            check_positive_int(f"{NAME}({key})", given[key])
    for key in ("narrow_transfers", "async_save", "verify", "init_on_meta"):
        check_bool(f"{NAME}({key})", given[key])
    for key in ("bind_to_numa_node", "pin_memory", "reshard_after_forward"):
        if given[key] is not None:
            check_bool(f"{NAME}({key})", given[key])
    _check_together(given)
    return OffloadArguments(
        **given
        | {
            "reshard_after_forward": _choose_reshard(given["shard"], given["reshard_after_forward"]),
            "device_bytes": _read_device_bytes(given["device_bytes"], given["offload"]),
            "nvme_path": _check_path(given["nvme_path"], given["offload"]),
            "timeout": _read_timeout(given["timeout"]),
        }
    )


def _read_offload(offload: Any) -> Any:
    """Convert a list of offloaded tensors to a mode."""
    if not isinstance(offload, set | frozenset | list | tuple):
        return offload
    mode = _PARTS.get(frozenset(offload)) if all(isinstance(part, str) for part in offload) else None
    if mode is None:
        known = ", ".join(f"[{', '.join(map(repr, parts))}]" for parts in (sorted(one) for one in _PARTS))
        raise ValueError(
            f"{NAME}(offload) as a list must be one of {known}, in any order, got {offload!r}: offloading "
            "parameters offloads gradients, and offloading gradients offloads the optimizer."
        )
    return mode


def _read_device_bytes(device_bytes: Any, offload: str) -> Any:
    if device_bytes is None:
        return None
    if offload != "params":
        raise ValueError(
            f"{NAME}(device_bytes={device_bytes!r}) chooses what stays on the device: it needs the default "
            f"offload='params', got offload={offload!r}."
        )
    if isinstance(device_bytes, float):
        if not 0 <= device_bytes <= 1:
            raise ValueError(
                f"{NAME}(device_bytes) as a float is a share of the model state, from 0.0 to 1.0, got {device_bytes}."
            )
        return device_bytes
    return "auto" if device_bytes == "auto" else parse_bytes(device_bytes, f"{NAME}(device_bytes)")


def _check_wrap(wrap: Any) -> None:
    is_list = isinstance(wrap, list | tuple) and all(isinstance(one, str | type) for one in wrap) and len(wrap) > 0
    if wrap != "auto" and not is_list and not (callable(wrap) and not isinstance(wrap, type)):
        raise TypeError(
            f"{NAME}(wrap) must be 'auto', a list of classes or class names, or a function of a module's name and the "
            f"module, got {wrap!r}."
        )


def _check_together(given: dict[str, Any]) -> None:
    if given["data_parallel_replicate_size"] is not None and given["shard"] != "hybrid":
        raise ValueError(
            f"{NAME}(data_parallel_replicate_size={given['data_parallel_replicate_size']}) needs shard='hybrid', got "
            f"shard={given['shard']!r}."
        )
    if given["pin_memory"] and given["offload"] == "none":
        raise ValueError(f"{NAME}(pin_memory=True) pins offloaded tensors, but offload='none' offloads none.")
    if given["bind_to_numa_node"] and given["offload"] == "none":
        raise ValueError(
            f"{NAME}(bind_to_numa_node=True) binds the threads of optimizer steps on the host, but offload='none' has "
            "none."
        )
    if given["master"] == "split" and given["offload"] == "none":
        raise ValueError(
            f"{NAME}(master='split') is a format of weights on the host, but offload='none' keeps them on the device."
        )
    if given["host_state"] != "fp32" and given["offload"] == "none":
        raise ValueError(
            f"{NAME}(host_state={given['host_state']!r}) is a format of moments on the host, but offload='none' keeps "
            "them on the device. Use MomentsInBF16 or LowBitOptimizer there."
        )
    if given["master"] == "split" and not given["narrow_transfers"]:
        raise ValueError(
            f"{NAME}(master='split') needs 16-bit transfers, got narrow_transfers=False. Leave one of them out."
        )


def _choose_reshard(shard: str, reshard_after_forward: Any) -> bool:
    if shard == "grad_op" and reshard_after_forward:
        raise ValueError(
            f"{NAME}(shard='grad_op') keeps layers whole after the forward, but reshard_after_forward=True shards "
            "them. Leave one of them out."
        )
    return shard != "grad_op" if reshard_after_forward is None else bool(reshard_after_forward)


def _check_path(path: Any, offload: str) -> Path | None:
    if path is None:
        return None
    if offload == "none":
        raise ValueError(f"{NAME}(nvme_path) stores optimizer state of steps on the host, but offload='none' has none.")
    if not isinstance(path, str | Path):
        raise TypeError(f"{NAME}(nvme_path) must be a path or None, got {path!r} of type {type(path).__name__}.")
    return Path(path)


def _read_timeout(timeout: Any) -> timedelta:
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool) and math.isfinite(timeout)
    period = timedelta(seconds=timeout) if is_number else timeout
    if not isinstance(period, timedelta) or period <= timedelta():
        raise ValueError(f"{NAME}(timeout) must be a positive number of seconds or a timedelta, got {timeout!r}.")
    return period


def check_run(trainer: pl.Trainer, name: str) -> None:
    """Refuse callbacks that cannot work with sharded parameters."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise MisconfigurationException(
                f"{type(callback).__name__} does not work with {name}: it copies the module, and a sharded module "
                "cannot be copied. Use WeightAveraging, or train with 'ddp' or a single device."
            )
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                f"{type(callback).__name__} does not work with {name}: it replaces parameters, which a sharded module "
                "does not support. Prune with 'ddp' or a single device."
            )


def check_device_bytes(device_bytes: Any, device: torch.device, name: str) -> None:
    """Refuse ``device_bytes="auto"`` without allocator statistics."""
    if device_bytes == "auto" and not has_cache(device):
        raise MisconfigurationException(
            f"{name}(device_bytes='auto') measures free device memory, and {device} has no allocator statistics. Give "
            "bytes, such as device_bytes='8GiB', or a share of the model state, such as 0.5."
        )


def check_module(module: pl.LightningModule, name: str) -> None:
    """Refuse a module without parameters."""
    if next(module.parameters(), None) is None:
        raise ValueError(
            f"{name}: {type(module).__name__} has no parameters to shard. Create its layers in __init__ or "
            "configure_model, or use a single device."
        )


def check_gradients(module: nn.Module, name: str) -> None:
    """Refuse layers with sparse gradients."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ValueError(
                f"{name}: {path} is {type(part).__name__}(sparse=True), and FSDP2 does not reduce sparse gradients. "
                "Leave sparse out."
            )


def check_layer_drop(module: nn.Module, num_ranks: int, name: str) -> None:
    """Warn if transformers would skip layers at random, which it does not on several ranks."""
    configs = (vars(part).get("config") for part in module.modules()) if num_ranks > 1 else ()
    for key, value in (item for config in configs for item in getattr(config, "__dict__", {}).items()):
        if key.endswith("layerdrop") and isinstance(value, float) and value > 0:
            rank_zero_warn(
                f"{name}: config.{key} is {value}, but all ranks must run the same layers, so models of "
                "transformers drop no layer, unlike on a single device. Set it to 0."
            )
            return


def check_master(master: str, low_precision_dtype: torch.dtype | None, precision: str, name: str) -> None:
    """Refuse to split weights that are not transferred as bf16."""
    if master == "split" and low_precision_dtype != torch.bfloat16:
        raise ValueError(f"{name}(master='split') needs precision='bf16-mixed', got {precision!r}.")


def check_cores(num_threads: int, name: str) -> None:
    """Warn of SLURM tasks with one core, the default."""
    if num_threads == 1 and "SLURM_JOB_ID" in os.environ:
        rank_zero_warn(
            f"{name} steps optimizers on the host, and SLURM gave this task one core. Request more with "
            "'#SBATCH --cpus-per-task=8' and 'export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK'."
        )


def check_loss(loss: Tensor, name: str) -> None:
    """Refuse a loss that contains a shard."""
    if isinstance(loss, DTensor):
        raise RuntimeError(
            f"{name}: the loss uses parameters of a layer outside its forward, where they are sharded. Compute this "
            "term, such as a weight penalty, inside the layer, or exclude the layer with `wrap`: excluded layers are "
            "whole during the whole step."
        )


def fitting_precision(plugin: Precision, name: str) -> Precision:
    """Replace Lightning's mixed precision, which clips and scales wrongly on shards; refuse what cannot shard."""
    if isinstance(plugin, LeanMixedPrecision):
        if plugin.settings.is_lean:
            raise ValueError(
                f"LeanMixedPrecision(parameters={plugin.settings.parameters!r}) does not work with {name}, which "
                "keeps fp32 shards and transfers 16 bit by itself: leave parameters out."
            )
        return plugin
    if type(plugin) is MixedPrecision:
        precision = "fp16" if plugin.precision == "16-mixed" else "bf16"
        return LeanMixedPrecision(precision, scaler=plugin.scaler)  # type: ignore[arg-type]
    if type(plugin) in (Precision, HalfPrecision, DoublePrecision):
        return plugin
    raise TypeError(
        f"{name} does not work with the precision plugin {type(plugin).__name__}: use precision='32-true', "
        "'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true', or LeanMixedPrecision."
    )
