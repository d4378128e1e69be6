"""Patches of Lightning for sharded parameters, and when steps may be early."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.core.gradients.clipping import clip_sharded_values
from lightning_vram.core.surgery.shadow import Shadow, instead
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.optimizers.stepping.steppable import iterate_parameters
from lightning_vram.techniques.sharding import FullSharding


def clip_on_shards(precision: Precision, optimizers: HostOptimizers, may_wait: Callable[[], bool]) -> list[Shadow]:
    """Clip on the local gradients, for any plugin: the dispatch of ``DTensor`` takes longer than the arithmetic."""

    def clip_norm(optimizer: Optimizer, clip_val: float) -> None:
        optimizers.clip_norm(optimizer, clip_val, may_wait=may_wait())

    def clip_value(optimizer: Optimizer, clip_val: float) -> None:
        clip_sharded_values(iterate_parameters(optimizer), clip_val)

    return [
        Shadow(precision, "clip_grad_by_norm", instead(clip_norm)),
        Shadow(precision, "clip_grad_by_value", instead(clip_value)),
    ]


def follow_toggles(module: pl.LightningModule, sharding: FullSharding) -> list[Shadow]:
    """Apply ``toggle_optimizer`` of manual optimization to gathered parameters, too."""
    follow = partial(_then, sharding.agree_on_gradients)
    return [Shadow(module, name, follow) for name in ("toggle_optimizer", "untoggle_optimizer")]


def log_numbers(module: pl.LightningModule) -> Shadow:
    """Convert sharded tensors to numbers for ``module.log``, which could not add them up."""

    def make(log: Callable[..., None]) -> Callable[..., None]:
        def log_number(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            log(name, value.item() if isinstance(value, DTensor) else value, *args, **kwargs)

        return log_number

    return Shadow(module, "log", make)


def _then(follow: Callable[[], None], inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        follow()
        return result

    return call
