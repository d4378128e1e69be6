"""Find the storages behind tensors: views share one, wrapper subclasses and sparse tensors have several."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_vram.private_names.torch.dispatch import is_traceable_wrapper_subclass
from lightning_vram.private_names.torch.tensors import sparse_indices, sparse_values
from lightning_vram.private_names.torch.trees import tree_leaves

_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def iterate_storages(tensor: Tensor) -> Iterator[tuple[torch.UntypedStorage, torch.device]]:
    """Yield each storage that holds data of ``tensor``, with its device.

    The device is the tensor's word, not the storage's: the storage of a fake tensor lies on ``meta``, whatever the
    tensor stands for. A tensor without accessible storage (opaque layouts such as mkldnn) yields nothing.
    """
    if is_lazy(tensor):
        return  # no storage yet
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, _ = wrapper.__tensor_flatten__()
        for part in (getattr(wrapper, name) for name in names):
            if isinstance(part, Tensor):  # a DTensor names its device mesh as well
                yield from iterate_storages(part)
    elif tensor.layout is torch.strided:
        if _has_storage(tensor):
            yield tensor.untyped_storage(), tensor.device
    else:
        for part in _sparse_parts(tensor):
            yield from iterate_storages(part)


def _has_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return sparse_indices(tensor), sparse_values(tensor)
    if tensor.layout in _COMPRESSED_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _COMPRESSED_COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def iterate_tensors(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch: any nest of containers, mappings, dataclasses and other objects with attributes."""
    for leaf in tree_leaves(nest):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):  # not every mapping is a dict: transformers' BatchEncoding
            yield from iterate_tensors(list(leaf.values()))
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | torch.nn.Module) and not callable(leaf):
            yield from iterate_tensors(list(vars(leaf).values()))
