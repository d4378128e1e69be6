"""Gradients of shards that stay in 16 bit, as they came, until somebody wants them in the dtype of their parameter."""

import torch
from torch import Tensor

from lightning_vram.core.tensors.parameter_classes import OURS
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part, set_own_part
from lightning_vram.techniques.sharding.gathered.watched_shards import unwatch

_NARROW = f"{OURS}narrow"
_FACTORS = f"{OURS}factors"


def keep_narrow(gradient: Tensor, narrow: Tensor) -> None:
    """Let the values of ``gradient``, a ``DTensor`` without any, be those of ``narrow``, until :func:`widen`."""
    vars(gradient)[_NARROW], vars(gradient)[_FACTORS] = narrow, []


def narrow_of(gradient: Tensor | None) -> Tensor | None:
    """Return what was kept, not scaled; ``None`` where a gradient has its own values, or there is none."""
    return None if gradient is None else vars(gradient).get(_NARROW)


def scale_narrow(gradient: Tensor, factor: Tensor) -> None:
    """Let ``gradient`` be what it is times a scalar."""
    if factor != 1:
        vars(gradient)[_FACTORS].append(factor)


@torch.no_grad()
def wide_part(gradient: Tensor, part: slice | None = None) -> Tensor:
    """Return the local part of a gradient in its own dtype, made for this if it is kept in 16 bit.

    Args:
        gradient: Of a shard.
        part: Some of its values, which come flat; ``None``: all, in their shape.
    """
    narrow = narrow_of(gradient)
    if narrow is None:
        own: Tensor = local_part(gradient)
        return own if part is None else own.reshape(-1)[part]
    wide = (narrow if part is None else narrow.reshape(-1)[part]).to(gradient.dtype)
    for factor in vars(gradient)[_FACTORS]:
        wide.mul_(factor)
    return wide


def narrow_part(gradient: Tensor | None, part: slice) -> tuple[Tensor, float] | None:
    """Return some values of a gradient as they are kept in 16 bit, flat, and what to multiply them by.

    ``None``: they are not, or it takes several factors, each of which rounds.
    """
    narrow = narrow_of(gradient)
    if gradient is None or narrow is None or len(vars(gradient)[_FACTORS]) > 1:
        return None
    return narrow.reshape(-1)[part], float(next(iter(vars(gradient)[_FACTORS]), 1.0))


def widen(gradient: Tensor) -> None:
    """Let ``gradient`` have its values in its own dtype."""
    if narrow_of(gradient) is not None:
        wide = wide_part(gradient)
        del vars(gradient)[_NARROW], vars(gradient)[_FACTORS]
        set_own_part(gradient, wide)
        unwatch([gradient])
