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
from typing import Any, Literal

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
    is_number = numpy is not None and isinstance(value, numpy.generic)
    return is_number or value is None or value is Ellipsis or isinstance(value, _CONSTANTS)


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


Role = Literal["columns", "samples"]

_PICTURE_DIMS = 3
_PICTURE_CHANNELS = (1, 3, 4)
_MOST_ROWS_OF_NUMBERS = 2  # columns with a number for each sample: inputs and targets
_MOST_EQUAL_COLUMNS = 3  # an anchor, a positive, a negative

SPLIT_HOOK = "define split_batch(batch, size) on the LightningModule"
WAY_OUT = f"pass split= to MicroBatching, or {SPLIT_HOOK}"
_ROOT = BatchPath()


class _Misfit(Exception):  # noqa: N818
    """An entry does not fit the size that was assumed."""

    def __init__(self, path: BatchPath, found: str) -> None:
        super().__init__(path.code)
        self.path, self.found = path, found


class _Layout:
    """The layout of a batch of ``size`` samples: a list is columns, or one entry per sample; ``known`` ones stay so."""

    def __init__(self, size: int, shared: SharedKeys, known: Mapping[BatchPath, Role]) -> None:
        self.size = size
        self.roles: dict[BatchPath, Role] = {}  # how each list that follows the batch is read
        self.why_ambiguous: str | None = None
        self._shared, self._known = shared, known

    def read(self, value: object, path: BatchPath = _ROOT) -> bool:
        """Return whether an entry is cut, or is for all samples; raise :class:`_Misfit` if it can be neither."""
        if self._shared.cover(path):
            return False
        rows = count_rows(value)
        if rows is not None:
            if rows not in (1, self.size):
                raise _Misfit(path, f"has {rows} rows ({describe(value)})")
            return rows == self.size
        parts = take_apart(value)
        if parts is None:
            if is_constant(value):
                return False
            raise _Misfit(path, f"has a type that cannot be split: {describe(value)}")
        if parts.is_list and not (path == _ROOT and isinstance(value, tuple)):
            return self._read_list(parts, path)
        return any(self._read_columns(parts, path))

    def _read_columns(self, parts: Parts, path: BatchPath) -> list[bool]:
        return [self.read(value, child) for value, child in zip(parts.values, path.children(parts), strict=True)]

    def _read_list(self, parts: Parts, path: BatchPath) -> bool:
        known = self._known.get(path)
        could_be_samples = known != "columns" and len(parts.values) == self.size and is_uniform(parts.values)
        if could_be_samples and path == _ROOT:  # a list of tensors is what a collate function makes
            could_be_samples = count_rows(parts.values[0]) is None
        columns = _Layout(self.size, self._shared, self._known)
        misfit: tuple[BatchPath, str] | None = None
        are_cut: list[bool] = []
        try:
            are_cut = columns._read_columns(parts, path) if known != "samples" else []
        except _Misfit as error:
            misfit = error.path, error.found  # not the error, whose frames hold the batch until gc finds the cycle
        # A list of texts or numbers is one of columns only if each follows.
        if (all if is_plain(parts.values) else any)(are_cut) and are_cut:
            self.roles |= columns.roles | {path: "columns"}
            self.why_ambiguous = self.why_ambiguous or columns.why_ambiguous
            if could_be_samples and known is None and self.size > 1:
                self.why_ambiguous = f"{path.code} has {self.size} columns, or {self.size} samples"
            return True
        if could_be_samples:
            self.roles[path] = "samples"
            return True
        if is_plain(parts.values) or (misfit is None and known != "samples"):
            return False
        raise _Misfit(*(misfit or (path, f"is a list of {len(parts.values)}")))


def is_uniform(values: Sequence[object]) -> bool:
    """Return whether all are of one kind, as samples are: containers of one type, tensors of one dtype and rank."""
    return len({_kind(value) for value in values}) == 1


def _kind(value: Any) -> object:
    if count_rows(value) is not None:
        return type(value), str(value.dtype), value.ndim
    if take_apart(value) is not None:
        return type(value)
    return "constant" if is_constant(value) else "object"


def _find_layout(batch: object, shared: SharedKeys, known: Mapping[BatchPath, Role]) -> _Layout:
    """Return the only layout that fits a batch: a wrong guess would train on wrong pairs."""
    fits, misfits = [], {}
    for size in _suggest_sizes(batch, shared):
        layout = _Layout(size, shared, known)
        try:
            fits += [layout] if layout.read(batch) else []
        except _Misfit as misfit:
            misfits[size] = misfit.with_traceback(None)
    if not fits:
        raise _explain(batch, shared, misfits)
    if len(fits) > 1:
        evidence = ", but ".join(_find_evidence(batch, shared, layout.size) for layout in fits)
        raise BatchSplitError(f"The batch size is ambiguous: {evidence}. To split it, {WAY_OUT}.")
    reason = fits[0].why_ambiguous
    if reason is None and isinstance(batch, list) and len(batch) > 1 and _ROOT not in known:
        reason = _why_unclear(batch, fits[0])
    if reason is not None:
        raise BatchSplitError(f"The batch layout is ambiguous: {reason}. To split it, {WAY_OUT}.")
    return fits[0]


def _suggest_sizes(batch: object, shared: SharedKeys) -> list[int]:
    """Return what may be the number of samples, the most frequent first; of texts only if there is nothing else."""
    rows, lists, texts = Counter[int](), Counter[int](), Counter[int]()
    for _, value in iterate(batch, _ROOT, shared):
        num_rows = count_rows(value)
        if num_rows is not None:
            rows[num_rows] += 1
        elif (parts := take_apart(value)) is not None and parts.is_list:
            (texts if is_plain(parts.values) else lists)[len(parts.values)] += 1
    found = [*rows.most_common(), *lists.most_common()] or texts.most_common()
    return list(dict.fromkeys(size for size, _ in found if size > 0))


def _why_unclear(batch: list[Any], layout: _Layout) -> str | None:
    """Say what an outermost list may be instead, though only one reading fits its sizes."""
    if layout.roles.get(_ROOT) == "samples":
        return f"{layout.size} samples, or {layout.size} batches" if all(map(_is_batch, batch)) else None
    may_be_samples = all(count_rows(value) is not None for value in batch) and _may_be_samples(batch)
    return f"{len(batch)} samples, or {len(batch)} columns of {layout.size}" if may_be_samples else None


def _is_batch(value: Any) -> bool:
    sizes = {count_rows(inner) for _, inner in iterate(value, _ROOT, SharedKeys(()))} - {None, 1}
    try:
        return len(sizes) == 1 and all(_Layout(size or 0, SharedKeys(()), {}).read(value) for size in sizes)
    except _Misfit:
        return False


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


def _find_evidence(batch: object, shared: SharedKeys, size: int) -> str:
    lists = []
    for path, value in iterate(batch, _ROOT, shared):
        if count_rows(value) == size:
            return f"{path.code} has {size} rows"
        if isinstance(value, list | tuple) and len(value) == size:
            lists.append(f"{path.code} is a list of {size}")
    return lists[0]


def _explain(batch: object, shared: SharedKeys, misfits: Mapping[int, _Misfit]) -> BatchSplitError:
    for size, misfit in misfits.items():
        return BatchSplitError(
            f"{misfit.path.code} {misfit.found}, but the batch has {size} samples "
            f"({_find_evidence(batch, shared, size)}). If it belongs to all samples, name it: "
            f'shared_keys=["{misfit.path.shared_key}"]; if not, {WAY_OUT}.'
        )
    return BatchSplitError(
        f"No entry of the batch shows how many samples it has: {describe(batch)}. To split it, {WAY_OUT}."
    )


_MAX_LENGTH = 160  # of the name of a shape


class BatchSplitter:
    """Finds the samples of batches, and cuts batches between them.

    These follow the samples: tensors and NumPy arrays with a row for each, and lists with an entry for each, such as
    captions, pictures of different sizes or targets of a detector. These are for all samples: ``None``, numbers, texts,
    tensors without dimensions or with one row, and ``shared_keys`` (such as ``"meta.weights"`` or ``"1.mask"``), which
    must be in every batch if ``has_all_keys``.

    A list may hold columns or samples. If a batch leaves that open, the layout of its lists in earlier batches decides.

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
        self._known: dict[BatchPath, Role] = {}

    def batch_size(self, batch: Any) -> int:
        """Return the number of samples; ``BatchSplitError`` if none or several fit, or a shared key is missing."""
        return self._read(batch).size

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Cut a batch into parts of ``sizes`` samples, together all, in new containers around views of the tensors."""
        layout = self._read(batch)
        if min(sizes, default=0) < 1 or sum(sizes) != layout.size:
            raise ValueError(f"split(sizes) must be numbers above 0 that add up to {layout.size}, got {list(sizes)}.")
        try:
            return self._cut(batch, _ROOT, layout, sizes)
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

    def _read(self, batch: Any) -> _Layout:
        if self._has_all_keys:
            self._shared.check(batch)
        try:
            layout = _find_layout(batch, self._shared, self._known)
        except BatchSplitError:
            if not self._known:
                raise
            layout = _find_layout(batch, self._shared, {})
        if layout.size > 1:  # one sample is read alike either way
            self._known |= layout.roles
        return layout

    def _cut(self, value: Any, path: BatchPath, layout: _Layout, sizes: Sequence[int]) -> list[Any]:
        parts = take_apart(value)
        starts = [sum(sizes[:position]) for position in range(len(sizes))]
        if count_rows(value) == layout.size and len(sizes) > 1 and not self._shared.cover(path):
            return [_cut_rows(value, start, size) for start, size in zip(starts, sizes, strict=True)]
        if parts is None or self._shared.cover(path):
            return [value for _ in sizes]
        if layout.roles.get(path) == "samples":
            samples = [refresh(sample) for sample in parts.values]
            return [parts.build(samples[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
        children = zip(parts.values, path.children(parts), strict=True)
        columns = [self._cut(inner, child, layout, sizes) for inner, child in children]
        built = [parts.build([column[part] for column in columns]) for part in range(len(sizes))]
        if getattr(value, _PER_SAMPLE_ATTRIBUTE, None):
            for part, start, size in zip(built, starts, sizes, strict=True):
                setattr(part, _PER_SAMPLE_ATTRIBUTE, getattr(value, _PER_SAMPLE_ATTRIBUTE)[start : start + size])
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
