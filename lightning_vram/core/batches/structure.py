"""What a batch contains: containers of any kind, tensors and arrays with one row per sample, and the paths of entries.

Containers are copied rather than constructed, so their other attributes stay and no ``__post_init__`` runs again. Parts
of tensors are views wherever the layout allows it. Sparse tensors, packed sequences and nested tensors of the strided
layout are copied: their samples are not contiguous in memory.
"""

import copy
import dataclasses
import types
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

_WHOLE = (str, torch.Tensor, torch.Size, PackedSequence, type)
_PER_SAMPLE_ATTRIBUTE = "_encodings"  # transformers' BatchEncoding answers word_ids(i) from this list


@dataclass(frozen=True)
class Parts:
    """A container, taken apart."""

    labels: tuple[Hashable, ...]
    """Keys, field names or positions."""
    values: tuple[Any, ...]
    build: Callable[[Sequence[Any]], Any]
    """Build a container of the same kind around other values; the one that was taken apart is left as it is."""
    has_attributes: bool = False
    """Whether labels are attributes of an object, rather than keys or positions."""
    is_list: bool = False
    """Whether it is a list, or a tuple without names: its entries may be columns, or samples."""


def take_apart(value: object) -> Parts | None:
    """Return what a container holds; ``None`` for anything else.

    Known are mappings, lists, tuples with and without names, dataclasses, attrs classes and ``SimpleNamespace``.
    """
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
