"""Versions of tensors: one more with each write, shared by views."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

from lightning_vram.core.tensors.parameter_classes import REAL_TYPES
from lightning_vram.private_names.torch.dispatch import (
    DispatchKey,
    FakeTensor,
    is_key_excluded,
    set_key_excluded,
    without_dispatch,
    without_modes,
)
from lightning_vram.private_names.torch.tensors import num_writes, storage_identity

NO_VERSION = -1


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was written to; :data:`NO_VERSION` if it is an inference tensor, which has none."""
    try:
        return num_writes(tensor)
    except RuntimeError:
        return NO_VERSION


def storage_address(tensor: Tensor) -> int:
    """Return what all views of one memory have in common; 0 for tensors without one piece of memory (sparse)."""
    try:
        return storage_identity(tensor)
    except (NotImplementedError, RuntimeError):
        return 0


def is_strided(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an ordinary one: its bytes are its elements."""
    return tensor.layout is torch.strided and not tensor.is_nested


def num_bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor; of a sparse one, as if it were dense, since ``nbytes`` is not defined for all."""
    return tensor.nbytes if tensor.layout is torch.strided else tensor.itemsize * tensor.numel()


def version_counter(tensor: Tensor) -> Tensor:
    """Return an empty tensor with the version counter of ``tensor``: it counts its writes and holds no memory."""
    counter = alias(tensor)
    counter.data = _nothing(tensor.dtype, tensor.device)
    return counter


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def alias(tensor: Tensor) -> Tensor:
    """Return another tensor on the same memory and version counter, without graph, unaffected by ``.data =``."""
    key = DispatchKey.ADInplaceOrView
    if is_key_excluded(key):  # below autograd an alias would count versions on its own
        is_excluded = False
        with set_key_excluded(key, is_excluded):
            return _detach(tensor)
    return _detach(tensor)


def _detach(tensor: Tensor) -> Tensor:
    if type(tensor) in REAL_TYPES:
        with without_dispatch():  # nobody needs to see it
            return tensor.detach()
    with without_modes() if isinstance(tensor, FakeTensor) else nullcontext():
        return tensor.detach()


def check_version(counter: Tensor, expected: int, shape: Sequence[int]) -> None:
    """Raise autograd's error if a saved tensor was overwritten: its own check is off while hooks are set."""
    if num_writes(counter) != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{counter.type()} {list(shape)}] is at version {num_writes(counter)}; expected version {expected} "
            "instead."
        )
