"""Cut a batch into micro-batches: by the user's function if there is one, else by the contents of the batch.

Tensors are cut along dimension 0 into views, so a step that writes into a tensor of its micro-batch writes into the
batch; containers are built anew. Entries that are the same for all samples go into every part. An ambiguous entry is
refused, and the message names it. It costs some microseconds of Python for each entry.
"""

import hashlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_vram.core.batches.contents import (
    BatchPath,
    BatchSplitError,
    Parts,
    SharedKeys,
    SplitArgumentError,
    count_elements,
    count_rows,
    cut_rows,
    describe,
    is_array,
    is_constant,
    is_plain,
    iterate,
    refresh,
    take_apart,
)
from lightning_vram.memory.device.out_of_memory import is_out_of_memory

Role = Literal["columns", "samples"]

_PICTURE_DIMS = 3
_PICTURE_CHANNELS = (1, 3, 4)
_MOST_ROWS_OF_NUMBERS = 2  # columns with a number for each sample: inputs and targets
_MOST_EQUAL_COLUMNS = 3  # an anchor, a positive, a negative


class Misfit(Exception):  # noqa: N818
    """An entry does not fit the size that was assumed."""

    def __init__(self, path: BatchPath, found: str) -> None:
        super().__init__(path.code)
        self.path = path
        self.found = found


class BatchLayout:
    """The layout of a batch of ``size`` samples: a list is columns, or one entry per sample; ``known`` ones stay so."""

    def __init__(self, size: int, shared: SharedKeys, known: Mapping[BatchPath, Role]) -> None:
        self.size = size
        self.roles: dict[BatchPath, Role] = {}  # how each list that follows the batch is read
        self.ambiguous: dict[BatchPath, str] = {}  # lists that could be read the other way as well
        self._is_confirmed = False
        self._has_odd_samples = False
        self._shared = shared
        self._known = known

    @property
    def is_sound(self) -> bool:
        """Whether the size rests on more than lists that look like columns of another size."""
        return self._is_confirmed or not self._has_odd_samples

    def read(self, value: object, path: BatchPath) -> bool:
        """Return whether an entry is cut, or is for all samples; raise :class:`Misfit` if it can be neither."""
        if self._shared.cover(path):
            return False
        rows = count_rows(value)
        if rows is not None:
            return self._read_rows(value, rows, path)
        parts = take_apart(value)
        if parts is not None:
            return self._read_list(parts, path) if parts.is_list else self.read_columns(parts, path)
        if is_constant(value):
            return False
        raise Misfit(path, f"has a type that cannot be split: {describe(value)}")

    def read_columns(self, parts: Parts, path: BatchPath) -> bool:
        """As :meth:`read`, for a container whose entries are columns."""
        paths = path.children(parts)
        is_cut = [self.read(value, child) for value, child in zip(parts.values, paths, strict=True)]
        if any(is_cut) and parts.is_list:
            self.roles[path] = "columns"
        return any(is_cut)

    def read_samples(self, parts: Parts, path: BatchPath) -> bool:
        """As :meth:`read`, for a list of as many entries as there are samples."""
        self.roles[path] = "samples"
        is_odd = path not in self._known and (look_like_columns(parts.values) or not is_uniform(parts.values))
        self._has_odd_samples |= is_odd
        self._is_confirmed |= not is_odd
        return True

    def _read_rows(self, value: object, rows: int, path: BatchPath) -> bool:
        if rows == self.size:
            self._is_confirmed = True
            return True
        if rows == 1:
            return False
        raise Misfit(path, f"has {rows} rows ({describe(value)})")

    def _read_list(self, parts: Parts, path: BatchPath) -> bool:
        known = self._known.get(path)
        could_be_samples = len(parts.values) == self.size and known != "columns"
        columns = BatchLayout(self.size, self._shared, self._known)
        misfit = columns._try_columns(parts, path) if known != "samples" else None
        if path in columns.roles:
            self.roles |= columns.roles
            self.ambiguous |= columns.ambiguous
            if could_be_samples and known is None and is_uniform(parts.values):
                self.ambiguous[path] = f"{self.size} columns, or {self.size} samples"
            self._is_confirmed |= columns._is_confirmed
            self._has_odd_samples |= columns._has_odd_samples
            return True
        if could_be_samples:
            return self.read_samples(parts, path)
        if is_plain(parts.values) or (misfit is None and known != "samples"):
            return False
        raise misfit if misfit and not is_uniform(parts.values) else Misfit(path, f"is a list of {len(parts.values)}")

    def _try_columns(self, parts: Parts, path: BatchPath) -> Misfit | None:
        """Note roles if the entries are columns; a list of texts or numbers is one of columns only if each follows."""
        try:
            if is_plain(parts.values):
                for value, child in zip(parts.values, path.children(parts), strict=True):
                    if not self.read(value, child):
                        return Misfit(path, f"is a list of {len(parts.values)}")
            self.read_columns(parts, path)
        except Misfit as misfit:
            self.roles.clear()
            return misfit
        return None


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
        first = values[0]
        is_floating = first.is_floating_point() if isinstance(first, Tensor) else first.dtype.kind == "f"
        return len(values) > _MOST_ROWS_OF_NUMBERS and is_floating
    return num_dims > 1 and len(values) > _MOST_EQUAL_COLUMNS


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


SPLIT_HOOK = "define split_batch(batch, size) on the LightningModule"
WAY_OUT = f"pass split= to MicroBatching, or {SPLIT_HOOK}"
_ROOT = BatchPath()


def find_batch_layout(batch: object, shared: SharedKeys, known: Mapping[BatchPath, Role]) -> BatchLayout:
    """Return the only layout that fits a batch: a wrong guess would train on wrong pairs. Lists may stay ambiguous."""
    samples = _read_as_samples(batch, shared, known)
    role = known.get(_ROOT)
    if samples is not None and role == "samples":
        return samples
    fits, misfits = _try_sizes(batch, shared, known)
    if len(fits) > 1:
        evidence = ", but ".join(_find_evidence(batch, shared, layout.size) for layout in fits)
        raise BatchSplitError(f"The batch size is ambiguous: {evidence}. To split it, {WAY_OUT}.")
    if not fits and samples is None:
        raise _explain(batch, shared, misfits)
    if not fits:
        assert samples is not None
        _refuse_two_batches(batch, shared)
        return samples
    if samples is not None and role is None and _look_like_samples(batch):
        raise BatchSplitError(
            f"The batch layout is ambiguous: {samples.size} samples, or {samples.size} columns of {fits[0].size}. "
            f"To split it, {WAY_OUT}."
        )
    return fits[0]


def _try_sizes(
    batch: object, shared: SharedKeys, known: Mapping[BatchPath, Role]
) -> tuple[list[BatchLayout], dict[int, Misfit]]:
    """Read the batch by every size it suggests, an outermost list as one of columns."""
    fits, misfits = [], {}
    parts = take_apart(batch)
    for size in _suggest_sizes(batch, shared):
        layout = BatchLayout(size, shared, known)
        try:
            is_cut = layout.read(batch, _ROOT) if parts is None else layout.read_columns(parts, _ROOT)
        except Misfit as misfit:
            misfits[size] = misfit
        else:
            fits += [layout] if is_cut and layout.is_sound else []
    return fits, misfits


def _suggest_sizes(batch: object, shared: SharedKeys) -> list[int]:
    """Return what may be the number of samples, the most frequent first; of texts only if there is nothing else."""
    strong, weak = Counter[int](), Counter[int]()
    for path, value in iterate(batch, _ROOT, shared):
        rows = count_rows(value)
        parts = take_apart(value) if rows is None else None
        if rows is not None:
            strong[rows] += 1
        elif parts is not None and parts.is_list and path != _ROOT:
            (weak if is_plain(parts.values) else strong)[len(parts.values)] += 1
    return [size for size, _ in (strong or weak).most_common() if size > 0]


def _read_as_samples(batch: Any, shared: SharedKeys, known: Mapping[BatchPath, Role]) -> BatchLayout | None:
    """Read an outermost list as one of samples; entries of several kinds and a tuple of tensors never are."""
    parts = take_apart(batch)
    if parts is None or not parts.is_list or known.get(_ROOT) == "columns" or not is_uniform(parts.values):
        return None
    if isinstance(batch, tuple) and count_rows(batch[0]) is not None:
        return None
    layout = BatchLayout(len(parts.values), shared, known)
    layout.read_samples(parts, _ROOT)
    return layout


def _look_like_samples(batch: Any) -> bool:
    """Return whether an outermost list that fits as columns may hold samples: records, pictures, waveforms."""
    if len(batch) == 1 or isinstance(batch, tuple):
        return False
    if count_rows(batch[0]) is None:
        return True
    if len({getattr(value, "shape", None) for value in batch}) > 1:
        return are_pictures(batch)
    return are_too_many_for_columns(batch)


def _refuse_two_batches(batch: Any, shared: SharedKeys) -> None:
    """Refuse two entries that are batches by themselves: of two loaders, or two columns of unequal size."""
    if len(batch) != 2:
        return
    sizes = [layout.size for value in batch for layout in _try_sizes(value, shared, {})[0][:1]]
    if len(sizes) == len(batch):
        raise BatchSplitError(
            f"batch[0] has {sizes[0]} rows, batch[1] has {sizes[1]}: two samples, or two batches of different "
            f"size. To split them, {WAY_OUT}."
        )


def _find_evidence(batch: object, shared: SharedKeys, size: int) -> str:
    for path, value in iterate(batch, _ROOT, shared):
        if count_rows(value) == size:
            return f"{path.code} has {size} rows"
    for path, value in iterate(batch, _ROOT, shared):
        parts = take_apart(value)
        if parts is not None and parts.is_list and len(parts.values) == size:
            return f"{path.code} is a list of {size}"
    return ""


def _explain(batch: object, shared: SharedKeys, misfits: Mapping[int, Misfit]) -> BatchSplitError:
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

    These follow the samples: tensors (also sparse and nested ones), NumPy arrays and packed sequences with a row for
    each, and lists with an entry for each, such as captions, pictures of different sizes or targets of a detector.
    These are for all samples: ``None``, numbers, texts, tensors without dimensions or with one row, and ``shared_keys``
    (such as ``"meta.weights"`` or ``"1.mask"``), which must be in every batch if ``has_all_keys``.

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
        if len(sizes) > 1:
            for path, layouts in layout.ambiguous.items():
                raise BatchSplitError(f"{path.code} is ambiguous: {layouts}. To split it, {WAY_OUT}.")
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
        """Count the elements of entries that follow the samples, or of all that are not shared if it cannot be cut."""
        try:
            layout = self._read(batch)
        except BatchSplitError:
            return sum(count_elements(value) for _, value in iterate(batch, _ROOT, self._shared))
        return self._count(batch, _ROOT, layout)

    def _read(self, batch: Any) -> BatchLayout:
        if self._has_all_keys:
            self._shared.check(batch)
        try:
            layout = find_batch_layout(batch, self._shared, self._known)
        except BatchSplitError:
            if not self._known:
                raise
            layout = find_batch_layout(batch, self._shared, {})
        if layout.size > 1:  # one sample is read alike either way
            self._known |= {path: role for path, role in layout.roles.items() if path not in layout.ambiguous}
        return layout

    def _cut(self, value: Any, path: BatchPath, layout: BatchLayout, sizes: Sequence[int]) -> list[Any]:
        if self._shared.cover(path):
            return [value for _ in sizes]
        starts = [sum(sizes[:position]) for position in range(len(sizes))]
        rows = count_rows(value)
        if rows is not None:
            is_cut = rows == layout.size and len(sizes) > 1
            return [cut_rows(value, *part) if is_cut else refresh(value) for part in zip(starts, sizes, strict=True)]
        parts = take_apart(value)
        if parts is None:
            return [value for _ in sizes]
        if layout.roles.get(path) == "samples":
            samples = [refresh(sample) for sample in parts.values]
            return [parts.build(samples[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
        children = zip(parts.values, path.children(parts), strict=True)
        columns = [self._cut(inner, child, layout, sizes) for inner, child in children]
        return [parts.build([column[part] for column in columns]) for part in range(len(sizes))]

    def _count(self, value: Any, path: BatchPath, layout: BatchLayout) -> int:
        if self._shared.cover(path) or is_constant(value):
            return 0
        parts = take_apart(value)
        if parts is None:
            return count_elements(value) if count_rows(value) == layout.size else 0
        if layout.roles.get(path) == "samples":
            return sum(count_elements(inner) for _, inner in iterate(value, path, self._shared))
        children = zip(parts.values, path.children(parts), strict=True)
        return sum(self._count(inner, child, layout) for inner, child in children)


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


_SEQUENCE_DIMS = (2, 3)  # [T, B] of tokens, [T, B, D]
SplitFunction = Callable[[Any, int], Sequence[Any]]


@dataclass(frozen=True)
class BatchFacts:
    """The size of a batch, by which micro-batch sizes are chosen."""

    num_samples: int
    num_elements: int  # of everything that has one entry per sample
    shape: str  # equal for batches that cost the same
    why_whole: str | None = None  # why it cannot be cut, so that it counts as one sample

    def elements_of(self, size: int) -> int:
        """Elements of a micro-batch of ``size`` samples."""
        return math.ceil(self.num_elements * min(size, self.num_samples) / max(1, self.num_samples))


class BatchCutter:
    """Cuts batches into views of their tensors.

    ``split(batch, size)`` returns micro-batches of ``size`` samples, the last one with the remainder. Tensors with too
    few dimensions for ``batch_dim`` are cut along their first. ``time_first`` names a layer that takes time before
    samples: batches that do not show where their samples are cannot be cut then.
    """

    def __init__(
        self,
        shared_keys: Sequence[str] = (),
        split: SplitFunction | None = None,
        *,
        batch_dim: int = 0,
        time_first: str | None = None,
        has_all_keys: bool = True,
    ) -> None:
        self._splitter = BatchSplitter(shared_keys, has_all_keys=has_all_keys)
        self._shared = SharedKeys(shared_keys)
        self._split = split
        self.batch_dim = batch_dim
        self._time_first = time_first if split is None else None

    def measure(self, batch: Any) -> BatchFacts:
        """Measure a batch; ``BatchSplitError`` if it cannot be split."""
        moved = self._move(batch, self.batch_dim, 0)
        num_samples = self._count(moved) if self._split is None else len(self._split(batch, 1))
        if num_samples < 1:
            raise SplitArgumentError(f"split_batch(batch, 1) returned no micro-batch for a {type(batch).__name__}.")
        if self._time_first is not None and not self._shows_samples(batch, num_samples):
            raise BatchSplitError(
                f"The module's layer {self._time_first!r} has batch_first=False, so dimension 0 of the batch may be "
                f"time ({describe_all(batch)}). Pass batch_dim=1 to MicroBatching if it is, batch_dim=0 if it is not, "
                "or split=."
            )
        if self.batch_dim and self._split is None:
            self._refuse_samples_first(batch, num_samples)
        num_elements = max(num_samples, self._splitter.elements(moved))
        return BatchFacts(num_samples, num_elements, f"{num_samples} of {self._splitter.shape_key(batch)}")

    def _count(self, moved: Any) -> int:
        try:
            return self._splitter.batch_size(moved)
        except BatchSplitError as error:
            if not self.batch_dim:
                raise
            raise type(error)(f"{error} Shapes are shown with dimension {self.batch_dim} (batch_dim=) first.") from None

    def _move(self, value: Any, source: int, destination: int) -> Any:
        if source == destination:
            return value
        try:
            return _move_dim(value, source, destination)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise BatchSplitError(f"batch_dim= cannot rebuild a micro-batch: {error} Please {WAY_OUT}.") from error

    def _shows_samples(self, batch: Any, num_samples: int) -> bool:
        """Whether something has an entry for each sample that has no time: labels, images, a list of texts."""
        for _, value in iterate(batch, BatchPath(), self._shared):
            parts = take_apart(value)
            if parts is not None and parts.is_list and len(parts.values) == num_samples and is_plain(parts.values):
                return True
            if count_rows(value) == num_samples and getattr(value, "ndim", 0) not in _SEQUENCE_DIMS:
                return True
        return False

    def _refuse_samples_first(self, batch: Any, num_samples: int) -> None:
        """Refuse what has its samples in dimension 0, and something else in ``batch_dim``: targets ``[B, 1]``."""
        for path, value in iterate(batch, BatchPath(), self._shared):
            sizes: Sequence[int] = getattr(value, "shape", ())
            is_known = count_rows(value) is not None and len(sizes) > self.batch_dim
            if is_known and sizes[self.batch_dim] != num_samples == sizes[0]:
                raise BatchSplitError(
                    f"{path.code} has {num_samples} samples in dimension 0 and not in batch_dim={self.batch_dim} "
                    f"({describe_all(value)}). To split it, {WAY_OUT}."
                )

    def measure_or_keep_whole(self, batch: Any) -> BatchFacts:
        """As :meth:`measure`, but a batch that cannot be cut is one sample, unless the arguments are wrong."""
        try:
            return self.measure(batch)
        except SplitArgumentError:
            raise
        except BatchSplitError as error:
            num_elements = max(1, self._splitter.elements(batch))
            return BatchFacts(1, num_elements, f"whole {self._splitter.shape_key(batch)}", why_whole=str(error))

    def cut(self, batch: Any, facts: BatchFacts, size: int) -> list[tuple[Any, int]]:
        """Cut into the fewest micro-batches of at most ``size`` samples, as equal as possible; with their sizes."""
        if facts.why_whole is not None:
            return [(refresh(batch), 1)]
        num_samples = facts.num_samples
        count = -(-num_samples // size)
        if self._split is None:
            # A last one of a single sample would be one that batch norms refuse.
            sizes = [num_samples // count + (number < num_samples % count) for number in range(count)]
            parts = self._splitter.split(self._move(batch, self.batch_dim, 0), sizes)
            return list(zip([self._move(part, 0, self.batch_dim) for part in parts], sizes, strict=True))
        size = min(size, num_samples)
        sizes = [size] * (num_samples // size) + [num_samples % size] * (num_samples % size > 0)
        parts = list(self._split(batch, size))
        if len(parts) != len(sizes):
            raise BatchSplitError(
                f"split_batch(batch, {size}) returned {len(parts)} micro-batches for {num_samples} samples, "
                f"expected {len(sizes)}: {size} samples each, the last one with the remainder."
            )
        return list(zip(parts, sizes, strict=True))


def find_time_first(module: nn.Module) -> str | None:
    """Return the name of the first recurrent layer or attention in ``module`` that has ``batch_first=False``."""
    layers = (
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and not layer.batch_first
    )
    return next(layers, None)


def _move_dim(value: Any, source: int, destination: int) -> Any:
    """Move a dimension of all tensors and arrays that have it: to the front as views, back contiguous."""
    has_dim = getattr(value, "ndim", 0) > max(source, destination)
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        moved = value.movedim(source, destination) if has_dim else value
        return moved if destination == 0 else moved.contiguous()
    if is_array(value):
        numpy = sys.modules["numpy"]
        moved = numpy.moveaxis(value, source, destination) if has_dim else value
        return moved if destination == 0 else numpy.ascontiguousarray(moved)
    parts = take_apart(value)
    return value if parts is None else parts.build([_move_dim(part, source, destination) for part in parts.values])
