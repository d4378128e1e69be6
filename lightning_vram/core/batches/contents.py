"""What a batch contains: containers of any kind, tensors and arrays with one row per sample, and the paths of entries.

Containers are copied rather than constructed, so their other attributes stay and no ``__post_init__`` runs again. Parts
of tensors are views, except of sparse and strided nested tensors and of packed sequences.
"""

import copy
import dataclasses
import enum
import numbers
import os
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_vram.private_names.torch import ragged_dimension, sparse_values

_WHOLE = (str, torch.Tensor, torch.Size, PackedSequence, type)
_PER_SAMPLE_ATTRIBUTE = "_encodings"  # transformers' BatchEncoding answers word_ids(i) from this list


@dataclass(frozen=True)
class Parts:
    """A container, taken apart."""

    labels: tuple[Hashable, ...]  # keys, field names or positions
    values: tuple[Any, ...]
    build: Callable[[Sequence[Any]], Any]  # makes a container of the same kind around other values
    has_attributes: bool = False  # whether labels are attributes of an object, rather than keys or positions
    is_list: bool = False  # whether it is a list, or a tuple without names: its entries may be columns, or samples


def take_apart(value: object) -> Parts | None:
    """Return what a mapping, list, tuple, dataclass, attrs class or ``SimpleNamespace`` holds; ``None`` for others."""
    if isinstance(value, _WHOLE):
        return None
    if isinstance(value, Mapping):
        return _take_mapping(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Parts(tuple(value._fields), tuple(value), type(value)._make, has_attributes=True)  # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return Parts(tuple(range(len(value))), tuple(value), partial(_build_sequence, value), is_list=True)
    names = tuple(name for name in _find_fields(value) if hasattr(value, name))
    if names:
        values = tuple(getattr(value, name) for name in names)
        return Parts(names, values, partial(_build_object, value, names), has_attributes=True)
    return None


def refresh(value: Any, is_kept: Callable[[Any], bool] = lambda value: False) -> Any:
    """Return an equal value in new containers; leaves, and what ``is_kept`` accepts, are the same objects."""
    parts = None if is_kept(value) else take_apart(value)
    return value if parts is None else parts.build([refresh(part, is_kept) for part in parts.values])


def _take_mapping(mapping: Mapping[Any, Any]) -> Parts:
    labels = tuple(mapping.keys())  # not iter(mapping), which gives the rows of a TensorDict
    values = tuple(mapping[key] for key in labels)
    extra = getattr(mapping, "__dict__", {}).get(_PER_SAMPLE_ATTRIBUTE)
    if isinstance(extra, list):
        return Parts((*labels, _PER_SAMPLE_ATTRIBUTE), (*values, extra), partial(_build_encoding, mapping, labels))
    return Parts(labels, values, partial(_build_mapping, mapping, labels))


def _build_mapping(mapping: Mapping[Any, Any], labels: Sequence[Hashable], values: Sequence[Any]) -> Mapping[Any, Any]:
    items = dict(zip(labels, values, strict=True))
    if type(mapping) is dict:
        return items
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(items)  # type: ignore[call-arg]
    clone = copy.copy(mapping)
    for key, value in items.items():
        clone[key] = value
    return clone


def iterates_over_rows(value: object) -> bool:
    """Whether it is a mapping by its keys and a stack of rows to ``iter()`` and slices, as a ``TensorDict`` is."""
    if type(value) is dict or not isinstance(value, Mapping):
        return False
    try:
        return len(value) > 0 and type(next(iter(value))) not in {type(key) for key in value.keys()}  # noqa: SIM118
    except (KeyError, RuntimeError, StopIteration, TypeError):
        return False


def _build_encoding(mapping: Mapping[Any, Any], labels: Sequence[Hashable], values: Sequence[Any]) -> Mapping[Any, Any]:
    clone = _build_mapping(mapping, labels, values[:-1])
    vars(clone)[_PER_SAMPLE_ATTRIBUTE] = values[-1]
    return clone


def _build_sequence(value: list[Any] | tuple[Any, ...], values: Sequence[Any]) -> list[Any] | tuple[Any, ...]:
    if type(value) is list or isinstance(value, tuple):
        return type(value)(values)
    clone = copy.copy(value)
    clone[:] = values
    return clone


def _find_fields(value: object) -> Sequence[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    attributes = getattr(type(value), "__attrs_attrs__", None)
    if attributes is not None:
        return [attribute.name for attribute in attributes]
    return list(vars(value)) if isinstance(value, types.SimpleNamespace) else []


def _build_object(value: object, names: Sequence[str], values: Sequence[Any]) -> object:
    clone = copy.copy(value)
    for name, part in zip(names, values, strict=True):
        object.__setattr__(clone, name, part)  # frozen classes refuse setattr
    return clone


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


class BatchSplitError(ValueError):
    """A batch cannot be cut into samples; the message names the entry and the ways out."""


class SplitArgumentError(BatchSplitError):
    """It cannot be cut as the user's arguments say: the arguments must change, whereas another batch may run whole."""


@dataclass(frozen=True)
class BatchPath:
    """The path from the root to an entry."""

    code: str = "batch"  # as code reaches it: ``batch["meta"].weights[0]``
    labels: tuple[Hashable, ...] = field(default=(), compare=False)

    def children(self, parts: Parts) -> Iterator["BatchPath"]:
        """Return the paths of the parts of the value at this path, in order."""
        for label in parts.labels:
            quoted = f'"{label}"' if isinstance(label, str) else repr(label)
            step = f".{label}" if parts.has_attributes else f"[{quoted}]"
            yield BatchPath(f"{self.code}{step}", (*self.labels, label))

    @property
    def dotted(self) -> str:
        """Keys, field names and positions from the root, as in ``"meta.weights.0"``."""
        return ".".join(str(label) for label in self.labels)

    @property
    def shared_key(self) -> str:
        """The text for ``shared_keys``: the entry's own name, or the dotted path where it has none."""
        name = self.labels[-1] if self.labels else ""
        return name if isinstance(name, str) else self.dotted


class SharedKeys:
    """Entries that are the same for all samples: keys or field names at any depth, or dotted paths from the root."""

    def __init__(self, names: Sequence[str]) -> None:
        check_shared_keys("shared_keys", names)
        self.names = tuple(names)

    def cover(self, path: BatchPath) -> bool:
        """Return whether the entry at ``path`` is named."""
        return bool(self.names) and (path.shared_key in self.names or path.dotted in self.names)

    def check(self, batch: object) -> None:
        """Raise ``SplitArgumentError`` if a named entry is not in ``batch``."""
        if not self.names:
            return
        paths = [path for path, _ in iterate(batch, BatchPath(), SharedKeys(()))][1:]
        present = {path.shared_key for path in paths} | {path.dotted for path in paths}
        keys = [path.shared_key for path in paths if len(path.labels) == 1 or "." not in path.shared_key]
        for name in self.names:
            if name not in present:
                there = ", ".join(repr(key) for key in dict.fromkeys(keys))
                raise SplitArgumentError(f"shared_keys names {name!r}, which is not in the batch; its keys: {there}.")


def check_shared_keys(name: str, names: object) -> None:
    """Raise ``TypeError`` if ``names`` is not a list, tuple or the like of texts; ``name`` is the argument as typed."""
    if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(one, str) for one in names):
        raise TypeError(f"{name} must be a list of names of entries, such as ['mask'] or [] for none, got {names!r}.")


def is_plain(values: Sequence[object]) -> bool:
    """Return whether there is nothing but constants inside: no tensor and no unknown object."""
    return all(_is_plain(value) for value in values)


def _is_plain(value: object) -> bool:
    if isinstance(value, str) or value is None:
        return True
    parts = take_apart(value)
    return is_constant(value) and not isinstance(value, Tensor) if parts is None else is_plain(parts.values)


def iterate(value: object, path: BatchPath, shared: SharedKeys) -> Iterator[tuple[BatchPath, object]]:
    """Yield all entries of a batch that are not shared, containers and their contents, with their paths."""
    if shared.cover(path):
        return
    yield path, value
    parts = take_apart(value)
    if parts is None:
        return
    is_plain_list = parts.is_list and is_plain(parts.values)
    if not is_plain_list or any(take_apart(inner) is not None for inner in parts.values):
        for inner, child in zip(parts.values, path.children(parts), strict=True):
            yield from iterate(inner, child, shared)
