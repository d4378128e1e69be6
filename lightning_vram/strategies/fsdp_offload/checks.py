"""What ``FSDPOffloadStrategy`` refuses before training."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_vram.memory.device.allocator import has_cache
from lightning_vram.precision import LeanMixedPrecision


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


def check_room(device_bytes: Any, device: torch.device, name: str) -> None:
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


def check_master(master: str, narrow_dtype: torch.dtype | None, precision: str, name: str) -> None:
    """Refuse to split weights that are not transferred as bf16."""
    if master == "split" and narrow_dtype != torch.bfloat16:
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
