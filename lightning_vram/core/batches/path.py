"""Paths of entries in a batch or an output: as code reaches them, and as ``shared_keys`` names them."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_vram.core.batches.leaves import is_constant
from lightning_vram.core.batches.structure import Parts, take_apart


class BatchSplitError(ValueError):
    """A batch cannot be cut into samples; the message names the entry and the ways out."""


class SplitArgumentError(BatchSplitError):
    """It cannot be cut as the user's arguments say: the arguments must change, whereas another batch may run whole."""


@dataclass(frozen=True)
class BatchPath:
    """The path from the root to an entry."""

    code: str = "batch"
    """As code reaches it: ``batch["meta"].weights[0]``."""
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
    holds_containers = any(take_apart(inner) is not None for inner in parts.values)
    if holds_containers or not (parts.is_list and is_plain(parts.values)):
        for inner, child in zip(parts.values, path.children(parts), strict=True):
            yield from iterate(inner, child, shared)
