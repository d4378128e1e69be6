"""Let autograd keep a 32-bit weight, which is alive anyway, in the place of the 16-bit cast that was made of it.

The backward casts again: the same kernel on the same values, so gradients are equal to the bit.
"""

from functools import partial

import torch
from torch import Tensor

from lightning_vram.core.hooks.remade_saves import RemadeSaves
from lightning_vram.core.tensors.versions import check_version
from lightning_vram.private_names.torch.tensors import num_writes


def cast(saves: RemadeSaves, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``weight`` in ``dtype``, differentiably. Among ``saves`` it is the weight, itself: FSDP2 refills it."""
    return saves.add(weight.to(dtype), partial(_recast, weight, num_writes(weight), dtype))


def _recast(weight: Tensor, version: int, dtype: torch.dtype) -> Tensor:
    try:
        check_version(weight, version, weight.shape)
    except RuntimeError as error:
        raise RuntimeError(
            f"{error} It is a weight, which the backward casts to {str(dtype).removeprefix('torch.')} again: "
            "use recast_in_backward=False, which saves a copy."
        ) from None
    return weight.to(dtype)
