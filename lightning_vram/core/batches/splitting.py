"""Cut a batch into micro-batches: by the user's function if there is one, else by the contents of the batch.

Tensors and arrays are cut along dimension 0 into views, so a step that writes into a tensor of its micro-batch writes
into the batch. Containers are copied rather than constructed, so their other attributes stay and no ``__post_init__``
runs again. Entries that are the same for all samples go into every part. An ambiguous entry is refused, and the message
names it. It costs some microseconds of Python for each entry.
"""

import copy
import dataclasses
import enum
import hashlib
import math
import numbers
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_vram.memory.device.out_of_memory import is_out_of_memory

_WHOLE = (str, torch.Tensor, torch.Size, PackedSequence, type)


@dataclass(frozen=True)
class Parts:
    """A container, taken apart."""

    labels: tuple[Hashable, ...]  # keys, field names or positions
    values: tuple[Any, ...]
    build: Callable[[Sequence[Any]], Any]  # makes a container of the same kind around other values
    has_attributes: bool = False  # whether labels are attributes of an object, rather than keys or positions
    is_list: bool = False  # whether it is a list, or a tuple without names: its entries may be columns, or samples


def take_apart(value: object) -> Parts | None:
    """Return what a mapping, list, tuple, dataclass or ``SimpleNamespace`` holds; ``None`` for others."""
    if isinstance(value, _WHOLE):
        return None
    if isinstance(value, Mapping):
        labels = tuple(value.keys())  # not iter(), which gives the rows of a TensorDict
        return Parts(labels, tuple(value[key] for key in labels), partial(_build_mapping, value, labels))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Parts(tuple(value._fields), tuple(value), type(value)._make, has_attributes=True)  # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return Parts(tuple(range(len(value))), tuple(value), partial(_build_sequence, value), is_list=True)
    if dataclasses.is_dataclass(value):
        names = tuple(one.name for one in dataclasses.fields(value) if hasattr(value, one.name))
    else:
        names = tuple(vars(value)) if isinstance(value, types.SimpleNamespace) else ()
    values = tuple(getattr(value, name) for name in names)
    return Parts(names, values, partial(_build_object, value, names), has_attributes=True) if names else None


def refresh(value: Any) -> Any:
    """Return an equal value in new containers; leaves are the same objects."""
    parts = take_apart(value)
    return value if parts is None else parts.build([refresh(part) for part in parts.values])


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


def _build_sequence(value: list[Any] | tuple[Any, ...], values: Sequence[Any]) -> list[Any] | tuple[Any, ...]:
    if type(value) is list or isinstance(value, tuple):
        return type(value)(values)
    clone = copy.copy(value)
    clone[:] = values
    return clone


def _build_object(value: object, names: Sequence[str], values: Sequence[Any]) -> object:
    clone = copy.copy(value)
    for name, part in zip(names, values, strict=True):
        object.__setattr__(clone, name, part)  # frozen classes refuse setattr
    return clone


_CONSTANTS = (numbers.Number, str, bytes, enum.Enum, os.PathLike, type, torch.dtype, torch.device, torch.Size, slice)


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
    """Return the size of dimension 0 of a tensor or an array; ``None`` where there is none, and for other kinds."""
    if isinstance(value, Tensor):
        has_rows = not value.is_nested and value.ndim and value.layout is torch.strided
        return int(value.size(0)) if has_rows else None
    return int(value.shape[0]) if is_array(value) and value.ndim else None  # type: ignore[attr-defined]


def describe(value: object) -> str:
    """Return dtype and shape, or the type: what determines how much a step on it costs."""
    if isinstance(value, Tensor) and value.is_nested:
        return f"nested {_dtype(value)}"
    if isinstance(value, Tensor) or is_array(value):
        return f"{_dtype(value)}{list(value.shape)}"  # type: ignore[attr-defined]
    return type(value).__name__


def _cut_rows(value: Any, start: int, size: int) -> Any:
    if not isinstance(value, Tensor):
        return value[start : start + size]
    part = value.narrow(0, start, size)
    if type(part) is not type(value) and not isinstance(value, torch.nn.Parameter):
        part = part.as_subclass(type(value))  # torchvision's tv_tensors come back plain
    for name, attribute in vars(value).items():
        vars(part).setdefault(name, attribute)
    return part


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


_PICTURE_DIMS = 3
_PICTURE_CHANNELS = (1, 3, 4)
_MOST_ROWS_OF_NUMBERS = 2  # columns with a number for each sample: inputs and targets
_MOST_EQUAL_COLUMNS = 3  # an anchor, a positive, a negative

SPLIT_HOOK = "define split_batch(batch, size) on the LightningModule"
WAY_OUT = f"pass split= to MicroBatching, or {SPLIT_HOOK}"
_ROOT = BatchPath()


def is_uniform(values: Sequence[object]) -> bool:
    """Return whether all are of one kind, as samples are: containers of one type, tensors of one dtype and rank."""
    return len({_kind(value) for value in values}) == 1


def _kind(value: Any) -> object:
    if count_rows(value) is not None:
        return type(value), str(value.dtype), value.ndim
    if take_apart(value) is not None:
        return type(value)
    return "constant" if is_constant(value) else "object"


def _may_be_samples(tensors: list[Any]) -> bool:
    """Return whether columns may be samples: pictures, or more of one shape than a batch has columns alike."""
    if len({value.shape for value in tensors}) > 1:
        return all(value.ndim == _PICTURE_DIMS and value.shape[0] in _PICTURE_CHANNELS for value in tensors)
    if len({value.dtype for value in tensors}) > 1:
        return False
    first = tensors[0]
    if first.ndim > 1:
        return len(tensors) > _MOST_EQUAL_COLUMNS
    is_floating = first.is_floating_point() if isinstance(first, Tensor) else first.dtype.kind == "f"
    return is_floating and len(tensors) > _MOST_ROWS_OF_NUMBERS


def _has_one_for_each(value: Any, path: BatchPath, size: int) -> bool:
    """Whether it is a list of texts or numbers with one for each sample; else it has columns, or is for all samples."""
    parts = take_apart(value)
    is_root_tuple = path == _ROOT and isinstance(value, tuple)
    if parts is None or not parts.is_list or is_root_tuple or len(value) != size or not is_plain(parts.values):
        return False
    if size > 1 and all(isinstance(inner, list | tuple) and len(inner) == size for inner in value):
        raise _ambiguous(f"{path.code} has {size} columns, or {size} samples")
    return True


def _ambiguous(reason: str) -> BatchSplitError:
    return BatchSplitError(f"The batch layout is ambiguous: {reason}. To split it, {WAY_OUT}.")


_MAX_LENGTH = 160  # of the name of a shape


class BatchSplitter:
    """Finds the samples of batches, and cuts batches between them.

    These follow the samples: tensors and NumPy arrays with a row for each, and lists of texts or numbers with an entry
    for each, such as captions. These are for all samples: ``None``, numbers, texts, tensors without dimensions or with
    one row, and ``shared_keys`` (such as ``"meta.weights"`` or ``"1.mask"``), which must be in every batch if
    ``has_all_keys``. Lists of tensors or of containers hold columns: with one for each sample, such as pictures of
    different sizes or targets of a detector, they are refused.

    A batch whose only tensors are in lists that may hold samples as well is refused, unless earlier batches have shown
    that these lists hold columns.

    Example:
        >>> import torch
        >>> splitter = BatchSplitter(shared_keys=["weights"])
        >>> batch = {"x": torch.arange(3), "text": ["a", "b", "c"], "weights": torch.ones(7)}
        >>> splitter.batch_size(batch)
        3
        >>> [(part["x"].tolist(), part["text"]) for part in splitter.split(batch, [2, 1])]
        [([0, 1], ['a', 'b']), ([2], ['c'])]
    """

    def __init__(self, shared_keys: Sequence[str] = (), *, has_all_keys: bool = True) -> None:
        self._shared = SharedKeys(shared_keys)
        self._has_all_keys = has_all_keys
        self._columns: set[BatchPath] = set()  # lists that hold columns, though their entries are alike as samples are

    def batch_size(self, batch: Any) -> int:
        """Return the number of samples; ``BatchSplitError`` if none or several fit, or a shared key is missing."""
        if self._has_all_keys:
            self._shared.check(batch)
        size, evidence = self._find_size(batch)
        for path, value in iterate(batch, _ROOT, self._shared):
            self._check(value, path, size, evidence)
        are_tensors = isinstance(batch, list) and len(batch) > 1 and all(count_rows(one) is not None for one in batch)
        if are_tensors and _ROOT not in self._columns and _may_be_samples(batch):
            raise _ambiguous(f"{len(batch)} samples, or {len(batch)} columns of {size}")
        return size

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Cut a batch into parts of ``sizes`` samples, together all, in new containers around views of the tensors."""
        size = self.batch_size(batch)
        if min(sizes, default=0) < 1 or sum(sizes) != size:
            raise ValueError(f"split(sizes) must be numbers above 0 that add up to {size}, got {list(sizes)}.")
        try:
            return self._cut(batch, _ROOT, size, sizes)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise BatchSplitError(f"A micro-batch cannot be rebuilt: {error} Please {WAY_OUT}.") from error

    def shape_key(self, batch: Any) -> str:
        """Return at most 160 characters, equal for batches of one structure, dtypes and shapes, on all ranks."""
        text = describe_all(batch)
        if len(text) <= _MAX_LENGTH:
            return text
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return f"{text[: _MAX_LENGTH - len(digest) - 4]}... {digest}"

    def elements(self, batch: Any) -> int:
        """Count the elements of tensors and arrays that are not shared."""
        leaves: list[Any] = [value for _, value in iterate(batch, _ROOT, self._shared) if count_rows(value) is not None]
        return sum(math.prod(leaf.shape) for leaf in leaves)

    def _find_size(self, batch: Any) -> tuple[int, str]:
        """Return the number of samples, and what shows it: tensors, or lists of texts if there are none."""
        entries = list(iterate(batch, _ROOT, self._shared))
        shown = [(rows, path, f"has {rows} rows") for path, rows in self._iterate_rows(batch, _ROOT) if rows]
        if not shown:
            if doubtful := [path for path, value in entries if count_rows(value)]:
                raise _ambiguous(f"{doubtful[0].code} is in a list that may have columns, or samples")
            shown = [
                (len(value), path, f"is a list of {len(value)}")
                for path, value in entries
                if isinstance(value, list | tuple) and value and _has_one_for_each(value, path, len(value))
            ]
        if not shown:
            raise BatchSplitError(
                f"No entry of the batch shows how many samples it has: {describe(batch)}. To split it, {WAY_OUT}."
            )
        several = [rows for rows, _, _ in shown if rows > 1]
        size = Counter(several).most_common(1)[0][0] if several else 1
        return size, next(f"{path.code} {found}" for rows, path, found in shown if rows == size)

    def _iterate_rows(self, value: Any, path: BatchPath) -> Iterator[tuple[BatchPath, int]]:
        """Yield the rows of tensors, but not of those in lists that may hold samples."""
        if self._shared.cover(path):
            return
        rows = count_rows(value)
        if rows is not None:
            yield path, rows
        parts = take_apart(value)
        if parts is not None and not self._may_hold_samples(value, path):
            for inner, child in zip(parts.values, path.children(parts), strict=True):
                yield from self._iterate_rows(inner, child)

    def _may_hold_samples(self, value: Any, path: BatchPath) -> bool:
        """Whether entries of a list are alike, as samples are; a loader's own list of tensors holds columns."""
        parts = take_apart(value)
        if parts is None or not parts.is_list or path in self._columns or is_plain(parts.values):
            return False
        is_collated = path == _ROOT and (isinstance(value, tuple) or all(count_rows(one) is not None for one in value))
        return not is_collated and is_uniform(parts.values)

    def _check(self, value: Any, path: BatchPath, size: int, evidence: str) -> None:
        """Refuse an entry that does not follow the samples, or may do so in two ways."""
        rows = count_rows(value)
        found = f"has {rows} rows ({describe(value)})" if rows not in (None, 1, size) else None
        if rows is None and take_apart(value) is None and not is_constant(value):
            found = f"has a type that cannot be split: {describe(value)}"
        if found is not None:
            raise BatchSplitError(
                f"{path.code} {found}, but the batch has {size} samples ({evidence}). If it belongs to all samples, "
                f'name it: shared_keys=["{path.shared_key}"]; if not, {WAY_OUT}.'
            )
        if size > 1 and self._may_hold_samples(value, path):
            if len(value) == size:
                raise _ambiguous(f"{path.code} has {size} columns, or {size} samples")
            self._columns.add(path)

    def _cut(self, value: Any, path: BatchPath, size: int, sizes: Sequence[int]) -> list[Any]:
        parts = take_apart(value)
        starts = [sum(sizes[:position]) for position in range(len(sizes))]
        if count_rows(value) == size and len(sizes) > 1 and not self._shared.cover(path):
            return [_cut_rows(value, start, count) for start, count in zip(starts, sizes, strict=True)]
        if parts is None or self._shared.cover(path):
            return [value for _ in sizes]
        if _has_one_for_each(value, path, size):
            samples = [refresh(sample) for sample in parts.values]
            return [parts.build(samples[start : start + count]) for start, count in zip(starts, sizes, strict=True)]
        children = zip(parts.values, path.children(parts), strict=True)
        columns = [self._cut(inner, child, size, sizes) for inner, child in children]
        built = [parts.build([column[part] for column in columns]) for part in range(len(sizes))]
        if getattr(value, _PER_SAMPLE_ATTRIBUTE, None):
            for part, start, count in zip(built, starts, sizes, strict=True):
                setattr(part, _PER_SAMPLE_ATTRIBUTE, getattr(value, _PER_SAMPLE_ATTRIBUTE)[start : start + count])
        return built


_PER_SAMPLE_ATTRIBUTE = "_encodings"  # transformers' BatchEncoding answers word_ids(i) from this list


def describe_all(value: Any) -> str:
    """Return dtypes and shapes of everything in a nest of containers."""
    parts = take_apart(value)
    if parts is None:
        return describe(value)
    if parts.is_list:
        inner = [describe_all(part) for part in parts.values]
        inside = f"{len(inner)} x {inner[0]}" if len(inner) > 1 and len(set(inner)) == 1 else ", ".join(inner)
    else:
        inside = ", ".join(f"{k}: {describe_all(part)}" for k, part in zip(parts.labels, parts.values, strict=True))
    return f"{type(value).__name__}({inside})"
