"""Arguments of ``FSDPOffloadStrategy``, and what it refuses before training, the same on every rank."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_vram.argument_checks import check_bool, check_choice, check_number, check_positive_int
from lightning_vram.callbacks.hook_points import offload_is_useless
from lightning_vram.memory.device.accelerators import has_cache
from lightning_vram.memory.units import parse_bytes
from lightning_vram.precision import LeanMixedPrecision
from lightning_vram.private_names.lightning import refuse_callbacks

Offload = Literal["params", "optimizer", "none"]
NAME = "FSDPOffloadStrategy"
_ON_HOST = ("pin_memory", "bind_to_numa_node", "master", "host_state", "nvme_path")
_NEEDS = (  # arguments, another one, and its values that they need
    *((name, "offload", ("params", "optimizer")) for name in _ON_HOST),
    ("device_bytes", "offload", ("params",)),
    ("data_parallel_replicate_size", "shard", ("hybrid",)),
    ("reshard_after_forward", "shard", ("full", "hybrid")),
)
_REFUSED = {
    "StochasticWeightAveraging": "copies parameters, and these are shards: average with WeightAveraging",
    "ModelPruning": "replaces parameters, and these are shards: prune with 'ddp' or a single device",
}
OF_TRAINER = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")


def check_arguments(init: Callable[..., None], given: dict[str, Any]) -> SimpleNamespace:
    """Check each argument of ``init``, by its annotation, and combinations; return all but those of the Trainer."""
    kinds = {key: kind for key, kind in get_type_hints(init).items() if key not in (*OF_TRAINER, "return")}
    for key, kind in kinds.items():
        _check_kind(f"{NAME}({key})", given[key], kind)
    arguments = SimpleNamespace(**{key: given[key] for key in kinds})
    for name, other, values in _NEEDS:
        is_off = given[name] in (None, "fp32") or given[name] is False
        if not is_off and given[other] not in values:
            needed = " or ".join(map(repr, values))
            raise ValueError(f"{NAME}({name}={given[name]!r}) needs {other}={needed}, got {given[other]!r}.")
    if arguments.reshard_after_forward is None:
        arguments.reshard_after_forward = arguments.shard != "grad_op"
    is_share = isinstance(arguments.device_bytes, float)
    if is_share and not 0 <= arguments.device_bytes <= 1:
        raise ValueError(f"{NAME}(device_bytes) as a share must be from 0.0 to 1.0, got {arguments.device_bytes}.")
    if not is_share and arguments.device_bytes not in (None, "auto"):
        arguments.device_bytes = parse_bytes(arguments.device_bytes, f"{NAME}(device_bytes)")
    arguments.nvme_path = None if arguments.nvme_path is None else Path(arguments.nvme_path)
    if not isinstance(arguments.timeout, timedelta):
        check_number(f"{NAME}(timeout)", arguments.timeout, int | float, "seconds, or a timedelta", at_least=1)
        arguments.timeout = timedelta(seconds=arguments.timeout)
    return arguments


def _check_kind(name: str, value: Any, kind: Any) -> None:
    if get_origin(kind) is Literal:
        check_choice(name, value, get_args(kind))
    if kind is bool or (kind == bool | None and value is not None):
        check_bool(name, value)
    if kind is int or (kind == int | None and value is not None):
        check_positive_int(name, value)


def check_run(trainer: pl.Trainer, device: torch.device, device_bytes: Any, name: str) -> None:
    """Refuse unsupported callbacks, and ``device_bytes="auto"`` without allocator statistics."""
    refuse_callbacks(name, trainer, _REFUSED)
    if device_bytes == "auto" and not has_cache(device):
        raise MisconfigurationException(
            f"{name}(device_bytes='auto') measures free device memory, and {device} has no allocator statistics. Give "
            "bytes, such as device_bytes='8GiB', or a share of the model state, such as 0.5."
        )


def decline_offload(arguments: SimpleNamespace, device: torch.device) -> None:
    """Keep everything on a device that shares the host's memory, unless arguments make the host's copy smaller."""
    is_plain = (arguments.nvme_path, arguments.master, arguments.host_state) == (None, "fp32", "fp32")
    way_out = "nvme_path, host_state='8bit' or master='split' save memory."
    if (
        arguments.offload != "none"
        and is_plain
        and offload_is_useless(device, f"{NAME} runs with offload='none'", way_out)
    ):
        vars(arguments).update(offload="none", device_bytes=None, pin_memory=None, bind_to_numa_node=None)


def check_module(module: pl.LightningModule, name: str) -> None:
    """Refuse layers with sparse gradients."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ValueError(
                f"{name}: FSDP2 reduces no sparse gradients: leave sparse=True out of {path}, {type(part).__name__}."
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
        raise ValueError(
            f"{name}(master='split') needs precision='bf16-mixed' with narrow_transfers=True, got {precision!r}."
        )


def check_cores(num_threads: int, name: str) -> None:
    """Warn of SLURM tasks with one core, the default."""
    if num_threads == 1 and "SLURM_JOB_ID" in os.environ:
        rank_zero_warn(
            f"{name} steps optimizers on the host, and SLURM gave this task one core. Request more with "
            "'#SBATCH --cpus-per-task=8' and 'export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK'."
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
        return LeanMixedPrecision("fp16" if plugin.precision == "16-mixed" else "bf16", scaler=plugin.scaler)
    if type(plugin) in (Precision, HalfPrecision, DoublePrecision):
        return plugin
    raise TypeError(
        f"{name} does not work with the precision plugin {type(plugin).__name__}: use precision='32-true', "
        "'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true', or LeanMixedPrecision."
    )
