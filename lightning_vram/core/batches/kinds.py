"""What the entries of a list have in common: how to tell columns from samples, texts and records."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_vram.core.batches.leaves import count_rows, is_constant
from lightning_vram.core.batches.structure import take_apart

_PICTURE_DIMS = 3
_PICTURE_CHANNELS = (1, 3, 4)
_MOST_ROWS_OF_NUMBERS = 2  # columns with a number for each sample: inputs and targets
_MOST_EQUAL_COLUMNS = 3  # an anchor, a positive, a negative


def is_plain(values: Sequence[object]) -> bool:
    """Return whether there is nothing but constants inside: no tensor and no unknown object."""
    return all(_is_plain(value) for value in values)


def _is_plain(value: object) -> bool:
    if isinstance(value, str) or value is None:
        return True
    parts = take_apart(value)
    return is_constant(value) and not isinstance(value, Tensor) if parts is None else is_plain(parts.values)


def is_uniform(values: Sequence[object]) -> bool:
    """Return whether all are of one kind, as samples are: same keys, same dtypes, same numbers of dimensions."""
    return len({_kind(value) for value in values}) == 1


def _kind(value: Any) -> Hashable:
    if count_rows(value) is not None:
        return type(value), str(getattr(value, "dtype", "")), getattr(value, "ndim", 0)
    parts = take_apart(value)
    if parts is None:
        return "constant" if is_constant(value) else "object"
    kinds = [_kind(part) for part in parts.values]
    return (type(value), frozenset(kinds)) if parts.is_list else (type(value), parts.labels, tuple(kinds))


def are_pictures(values: Sequence[Any]) -> bool:
    """Return whether all could be pictures without a batch dimension, ``[C, H, W]``."""
    return all(getattr(v, "ndim", 0) == _PICTURE_DIMS and v.shape[0] in _PICTURE_CHANNELS for v in values)


def are_too_many_for_columns(values: Sequence[Any]) -> bool:
    """Return whether tensors of one shape and dtype are more than a batch has columns alike: they may be samples."""
    num_dims = getattr(values[0], "ndim", 0)
    if num_dims == 1:
        return len(values) > _MOST_ROWS_OF_NUMBERS and _is_floating(values[0])
    return num_dims > 1 and len(values) > _MOST_EQUAL_COLUMNS


def _is_floating(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"


def look_like_columns(values: Sequence[Any]) -> bool:
    """Return whether they are columns of one batch rather than samples, as far as can be told without a size."""
    if are_pictures(values) or any(isinstance(value, Mapping) for value in values):
        return False
    rows = set(_iterate_rows(values))
    return len(rows) == 1 and rows != {1}


def _iterate_rows(values: Sequence[object]) -> Iterator[int]:
    for value in values:
        rows = count_rows(value)
        parts = take_apart(value)
        if rows is not None:
            yield rows
        elif parts is not None and (parts.is_list or not parts.has_attributes):
            yield from _iterate_rows(parts.values)
