"""The layouts of a batch of an assumed size: which entries follow the samples, and which are for all."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from lightning_vram.core.batches.leaves import count_rows, describe, is_constant
from lightning_vram.core.batches.path import BatchPath, SharedKeys, is_plain
from lightning_vram.core.batches.structure import Parts, take_apart

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


class Reading:
    """The layout of a batch of ``size`` samples; lists in ``known`` keep the role they had in earlier batches.

    A list can be columns, as collate functions make them, or samples, one entry each. Columns are tried first. A list
    that fits both and holds entries of one kind is ambiguous.
    """

    def __init__(self, size: int, shared: SharedKeys, known: Mapping[BatchPath, Role]) -> None:
        self.size = size
        self.roles: dict[BatchPath, Role] = {}
        """How each list that follows the batch is read."""
        self.ambiguous: dict[BatchPath, str] = {}
        """Lists that could be read the other way as well."""
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
        columns = Reading(self.size, self._shared, self._known)
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
