"""The arguments of a Trainer that is running, as far as memory depends on them."""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy

from lightning_vram.private_names.lightning.strategies import ddp_arguments, mesh_sizes, syncs_layers

_BY_NAME = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


def read_trainer_arguments(trainer: pl.Trainer) -> dict[str, Any]:
    """Return arguments for another Trainer, which runs the same step.

    Callbacks and plugins are those of ``trainer``, to be copied. The strategy is a new one.

    Args:
        trainer: That is in its ``setup`` hooks.

    Raises:
        ValueError: If nobody knows how to make another strategy of its kind.
    """
    arguments: dict[str, Any] = {
        "callbacks": list(trainer.callbacks),  # type: ignore[attr-defined]
        "strategy": _another(trainer.strategy),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "inference_mode": trainer.fit_loop.epoch_loop.val_loop.inference_mode,
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": _determinism(),
        "sync_batchnorm": syncs_layers(trainer.strategy),
    }
    plugin = trainer.precision_plugin
    if type(plugin) in _BY_NAME:
        return arguments | {"precision": plugin.precision}
    return arguments | {"plugins": [plugin]}


def _another(strategy: Strategy) -> Strategy | str:
    make_again: Callable[[], Strategy] | None = getattr(strategy, "make_again", None)  # of fsdp_offload
    if make_again is not None:
        return make_again()
    if isinstance(strategy, SingleDeviceStrategy):
        return "auto"
    if isinstance(strategy, DDPStrategy):
        return DDPStrategy(**copy.deepcopy(ddp_arguments(strategy)))
    if isinstance(strategy, ModelParallelStrategy):
        return ModelParallelStrategy(**mesh_sizes(strategy))
    raise ValueError(f"{type(strategy).__name__} is not known to it")


def _determinism() -> bool | str:
    if not torch.are_deterministic_algorithms_enabled():
        return False
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else True
