"""Entries with one row per sample, and how to cut them between samples."""

import enum
import numbers
import os
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_vram.core.batches.structure import iterates_over_rows, take_apart
from lightning_vram.private_names.torch.tensors import ragged_dimension, sparse_values

_CONSTANTS = (numbers.Number, str, bytes, enum.Enum, os.PathLike, type, torch.dtype, torch.device, torch.Size, slice)
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.jagged)


def is_array(value: object) -> bool:
    """Return whether it is a NumPy array; NumPy need not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_constant(value: object) -> bool:
    """Return whether its type makes it equal for all samples: a number, a text, a tensor without dimensions."""
    if isinstance(value, str):
        return True
    if isinstance(value, Tensor) or is_array(value):
        return not value.ndim  # type: ignore[attr-defined]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return True
    return value is None or value is Ellipsis or isinstance(value, _CONSTANTS)


def count_rows(value: object) -> int | None:
    """Return the size of dimension 0; ``None`` where there is none, or where the kind is unknown."""
    if isinstance(value, str):  # captions are many
        return None
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, Tensor):
        if not value.ndim or value.layout not in _LAYOUTS or (value.is_sparse and not value.sparse_dim()):
            return None
        return int(value.size(0))
    if iterates_over_rows(value):
        return len(value)  # type: ignore[arg-type]
    return int(value.shape[0]) if is_array(value) and value.ndim else None  # type: ignore[attr-defined]


def count_elements(value: object) -> int:
    """Return the number of elements that are stored in a tensor, an array or a packed sequence; 0 for others."""
    if isinstance(value, PackedSequence):
        return value.data.numel()
    if isinstance(value, Tensor):
        if value.is_nested and value.layout is torch.jagged:
            return value.values().numel()
        return sparse_values(value).numel() if value.is_sparse else value.numel()
    if iterates_over_rows(value):
        parts = take_apart(value)
        return sum(count_elements(part) for part in (parts.values if parts is not None else ()))
    return int(value.size) if is_array(value) else 0  # type: ignore[attr-defined]


def describe(value: object) -> str:
    """Return dtype and shape, or the type: what determines how much a step on it costs."""
    if isinstance(value, PackedSequence):
        return f"PackedSequence({describe(value.data)}, {len(value.batch_sizes)} steps of {count_rows(value)} samples)"
    if isinstance(value, Tensor) and value.is_nested:
        inside = value.values().shape if value.layout is torch.jagged else (value.numel(),)
        return f"{_dtype(value)}{[value.size(0), '*', *inside[1:]]} of {count_elements(value)}".replace("'", "")
    if isinstance(value, Tensor) or is_array(value):
        return f"{_dtype(value)}{list(value.shape)}"  # type: ignore[attr-defined]
    if iterates_over_rows(value):
        parts = take_apart(value)
        assert parts is not None
        columns = [f"{key}: {describe(part)}" for key, part in zip(parts.labels, parts.values, strict=True)]
        return f"{type(value).__name__}({', '.join(columns)})"
    return type(value).__name__


def cut_rows(value: Any, start: int, size: int) -> Any:
    """Return ``size`` samples, at least 1, from ``start`` on, of something that :func:`count_rows` has a number for."""
    if isinstance(value, PackedSequence):
        return _cut_packed(value, start, size)
    if not isinstance(value, Tensor):
        return value[start : start + size]
    if value.is_nested:
        return _cut_nested(value, start, size)
    if value.is_sparse:
        return value.narrow_copy(0, start, size)
    part = value.narrow(0, start, size)
    if type(part) is not type(value) and not isinstance(value, torch.nn.Parameter):
        part = part.as_subclass(type(value))  # torchvision's tv_tensors come back plain
    for name, attribute in vars(value).items():
        vars(part).setdefault(name, attribute)
    return part


def _cut_nested(value: Tensor, start: int, size: int) -> Tensor:
    if value.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(list(value.unbind())[start : start + size])
    dim = ragged_dimension(value)
    offsets = value.offsets()  # type: ignore[attr-defined]
    first, end = (int(offsets[position]) for position in (start, start + size))
    lengths = value.lengths()  # type: ignore[attr-defined]
    return torch.nested.nested_tensor_from_jagged(
        value.values().narrow(dim - 1, first, end - first),
        offsets.narrow(0, start, size + 1) - first,
        lengths=lengths if lengths is None else lengths.narrow(0, start, size),
        jagged_dim=dim,
    )


def _cut_packed(value: PackedSequence, start: int, size: int) -> PackedSequence:
    """Gather the rows of some samples; a packed sequence holds time after time, its samples from long to short."""
    order = value.sorted_indices
    original = torch.arange(int(value.batch_sizes[0])) if order is None else order.cpu()
    ranks = torch.nonzero((original >= start) & (original < start + size)).squeeze(1)
    at_time = ranks < value.batch_sizes.unsqueeze(1)  # [T, samples]
    begin = (value.batch_sizes.cumsum(0) - value.batch_sizes).unsqueeze(1)
    rows = (begin + ranks)[at_time].to(value.data.device)
    sizes = at_time.sum(1)
    sizes = sizes[sizes > 0]
    if order is None:
        return PackedSequence(value.data.index_select(0, rows), sizes)
    new_order = (original[ranks] - start).to(order.device)
    return PackedSequence(value.data.index_select(0, rows), sizes, new_order, new_order.argsort())


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")
