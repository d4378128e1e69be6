"""Combine what a step returned for micro-batches to what it would have returned for the whole batch."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_vram.core.batches.leaves import describe, is_array, is_constant
from lightning_vram.core.batches.path import BatchPath
from lightning_vram.core.batches.reading import is_uniform
from lightning_vram.core.batches.structure import take_apart
from lightning_vram.core.batches.weighted_mean import weighted_mean, weighted_mean_of_numbers

_HOOK = "Define combine_outputs(outputs, sizes) on the LightningModule."


class OutputCombineError(ValueError):
    """Outputs cannot be combined; the message names the entry, what was found, and the way out."""


def combine_outputs(outputs: Sequence[Any], sizes: Sequence[int], shares: Sequence[float], batch_dim: int = 0) -> Any:
    """Combine the outputs of micro-batches of ``sizes`` samples; joined or averaged entries have no graph.

    The rule, entry by entry, through mappings, lists, tuples, dataclasses and the like:

    * the same object, or an equal text, ``bool`` or ``None`` in all: that,
    * tensors and arrays with as many rows as there are samples, also along ``batch_dim``: all rows, in order,
    * single numbers with a fraction, as losses are: their mean, weighted by ``shares``; equal ones stay bitwise equal,
    * lists with an entry for each sample: all entries, in order,
    * anything else: refused (``OutputCombineError``). So are whole numbers, which may be counts or the same for all,
      and mappings with whole numbers for keys.

    A tensor that has as many rows as each micro-batch has samples by chance, such as a histogram, cannot be
    distinguished from one with a row for each.

    Example:
        >>> parts = [{"loss": 1.0, "logits": torch.zeros(3, 2)}, {"loss": 5.0, "logits": torch.ones(1, 2)}]
        >>> whole = combine_outputs(parts, [3, 1], [0.75, 0.25])
        >>> whole["loss"], whole["logits"].shape
        (2.0, torch.Size([4, 2]))
    """
    if len(outputs) == 1:
        return outputs[0]
    return _Combination(sizes, shares, batch_dim).combine(list(outputs), BatchPath("output"))


class _Combination:
    """Combines entries of outputs; counts the entries that it joined row by row."""

    def __init__(self, sizes: Sequence[int], shares: Sequence[float], batch_dim: int) -> None:
        self.sizes = list(sizes)
        self.shares = shares
        self.batch_dim = batch_dim
        self.num_joined = 0

    def combine(self, values: list[Any], path: BatchPath) -> Any:
        first = values[0]
        if _is_count(first):
            raise _refuse(path, values, "are ambiguous: counts that add up, or one value for all")
        if all(value is first for value in values):
            return first
        if any(type(value) is not type(first) for value in values):
            raise _refuse(path, values, "have different types")
        if isinstance(first, Tensor) or is_array(first):
            return self._join(values, path) if first.ndim else self._average_tensors(values, path)
        parts = take_apart(first)
        if parts is not None:
            return self._combine_lists(values, path) if parts.is_list else self._combine_columns(values, path)
        if is_constant(first) and not isinstance(first, PackedSequence) and all(value == first for value in values):
            return first
        if isinstance(first, float) or getattr(getattr(first, "dtype", None), "kind", "") == "f":  # or a NumPy number
            return weighted_mean_of_numbers(values, self.shares, self.sizes)
        raise _refuse(path, values, f"differ: {values[0]!r}, {values[1]!r}" if is_constant(first) else "are unknown")

    def _join(self, values: list[Any], path: BatchPath) -> Any:
        first = values[0]
        dims = [dim for dim in dict.fromkeys((0, self.batch_dim)) if [_size(one, dim) for one in values] == self.sizes]
        if not dims:
            raise _refuse(path, values, f"do not have a row for each of {self.sizes} samples")
        if len(dims) > 1:
            raise _refuse(path, values, f"have a row for each of {self.sizes} samples in dimensions {dims}")
        self.num_joined += 1
        is_nested = isinstance(first, Tensor) and first.is_nested
        if len({_row(value, dims[0]) for value in values}) > 1:
            raise _refuse(path, values, "differ in more than the number of rows")
        if is_nested:
            rows = [row.detach() for value in values for row in value.unbind()]
            return torch.nested.as_nested_tensor(rows, layout=first.layout)
        if isinstance(first, Tensor):
            return torch.cat([value.detach() for value in values], dims[0])
        return sys.modules["numpy"].concatenate(values, dims[0])

    def _average_tensors(self, values: list[Any], path: BatchPath) -> Any:
        first = values[0]
        if any(value.dtype != first.dtype for value in values):
            raise _refuse(path, values, "differ in dtype")
        if not isinstance(first, Tensor):
            return self.combine([value[()] for value in values], path)
        return weighted_mean([value.detach() for value in values], self.shares, self.sizes)

    def _combine_columns(self, values: list[Any], path: BatchPath) -> Any:
        all_parts = [parts for parts in map(take_apart, values) if parts is not None]
        if not all_parts[0].is_list and any(isinstance(label, int) for label in all_parts[0].labels):
            raise _refuse(path, values, "have integer keys, which may be samples or classes")
        if any(parts.labels != all_parts[0].labels for parts in all_parts):
            raise _refuse(path, values, "differ in " + ("length" if all_parts[0].is_list else "what they hold"))
        columns = zip(*(parts.values for parts in all_parts), strict=True)
        paths = path.children(all_parts[0])
        return all_parts[0].build([self.combine(list(c), child) for c, child in zip(columns, paths, strict=True)])

    def _combine_lists(self, values: list[Any], path: BatchPath) -> Any:
        """Combine lists as columns if rows are joined inside, else as one entry for each sample."""
        if [len(value) for value in values] != self.sizes:
            return self._combine_columns(values, path)
        columns = _Combination(self.sizes, self.shares, self.batch_dim)
        try:
            combined = columns._combine_columns(values, path)
        except OutputCombineError:
            columns.num_joined = 0
        if not columns.num_joined:
            self.num_joined += 1
            return take_apart(values[0]).build([entry for value in values for entry in _detach(value)])  # type: ignore[union-attr]
        if isinstance(values[0], list) and is_uniform(values[0]):
            raise _refuse(path, values, "are ambiguous: columns, or an entry for each sample")
        self.num_joined += columns.num_joined
        return combined


def _detach(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    parts = take_apart(value)
    return value if parts is None else parts.build([_detach(part) for part in parts.values])


def _is_count(value: Any) -> bool:
    if isinstance(value, Tensor):
        kind = value.dtype
        return not (value.ndim or kind.is_floating_point or kind.is_complex or kind is torch.bool)
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        return not getattr(value, "ndim", 0) and dtype.kind in "iu"
    return isinstance(value, int) and not isinstance(value, bool)


def _size(value: Any, dim: int) -> int | None:
    if isinstance(value, Tensor) and value.is_nested:
        return value.size(0) if dim == 0 else None
    return value.shape[dim] if dim < value.ndim else None


def _row(value: Any, dim: int) -> tuple[object, ...]:
    """Return what values must have in common to be joined: all sizes but one."""
    if isinstance(value, Tensor) and value.is_nested:
        return value.dtype, value.ndim
    return value.dtype, *value.shape[:dim], *value.shape[dim + 1 :], getattr(value, "layout", None)


def _refuse(path: BatchPath, values: Sequence[Any], reason: str) -> OutputCombineError:
    found = ", ".join(dict.fromkeys(describe(value) for value in values))
    return OutputCombineError(f"{path.code} cannot be combined: its values ({found}) {reason}. {_HOOK}")
