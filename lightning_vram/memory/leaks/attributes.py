"""Attributes that hold more with every step, measured now and then: nothing of a single step stays."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_vram.memory.leaks.births import storages_of
from lightning_vram.memory.leaks.holders import Holder
from lightning_vram.private_names.torch.tensors import storage_key
from lightning_vram.private_names.torch.trees import tree_leaves

_LOOKED_AT_BY_THEMSELVES = ("_modules", "_parameters")  # tables of nn.Module
_BUFFERS = "_buffers"  # are attributes, too


@dataclass(frozen=True)
class Held:
    """What an attribute holds."""

    num_bytes: int = 0  # of its tensors and arrays, on all devices together
    container: str = ""  # its class, if it has several items; else empty
    num_items: int = 0  # of the container


def iterate_attributes(name: str, owner: object) -> Iterator[tuple[str, Any]]:
    """Yield attributes and buffers with paths such as ``"self.net.outputs"``; no parameters and submodules."""
    for attribute, value in list(getattr(owner, "__dict__", {}).items()):
        if attribute == _BUFFERS:
            yield from ((f"{name}.{key}", buffer) for key, buffer in value.items())
        elif attribute not in _LOOKED_AT_BY_THEMSELVES:
            yield f"{name}.{attribute}", value


def read_attributes(owners: Iterable[tuple[str, object]]) -> dict[str, Held]:
    """Return what attributes hold in tensors and arrays, by path; not what holds nothing, nor a deque with a length."""
    values = (pair for name, owner in owners for pair in iterate_attributes(name, owner))
    return {path: held for path, value in values if (held := _held(value)).num_bytes}


def _held(value: Any) -> Held:
    if isinstance(value, deque) and value.maxlen is not None:
        return Held()
    try:
        leaves = tree_leaves(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = {storage_key(storage): int(storage.nbytes()) for storage in storages_of(tensors)}
    except (AttributeError, RuntimeError):  # a list that contains itself; tensors that are half made
        return Held()
    of_arrays = sum(_array_bytes(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
    is_container = isinstance(value, dict | list | tuple | deque) and len(value) > 1
    num_bytes = sum(sizes.values()) + of_arrays
    return Held(num_bytes, type(value).__name__, len(value)) if is_container else Held(num_bytes)


def _array_bytes(leaf: Any) -> int:
    num_bytes = getattr(leaf, "nbytes", 0) if type(leaf).__name__ == "ndarray" else 0  # of NumPy, or of its kin
    return num_bytes if isinstance(num_bytes, int) else 0


class GrowingAttributes:
    """Attributes that have grown by ``min_bytes`` per step from look to look, since the first."""

    def __init__(self, read: Callable[[], Mapping[str, Held]], min_bytes: int, step: int) -> None:
        self._read = read
        self._min_bytes = min_bytes
        self._first_step = self._last_step = step
        self._first = read()
        self._grown: dict[str, Held] | None = None  # at the last look, after the first

    def look(self, step: int) -> dict[str, tuple[Held, int]]:
        """Return, by path, what has grown since the last look, and the bytes per step since the first."""
        least_bytes = self._min_bytes * max(1, step - self._last_step)
        before = self._first if self._grown is None else self._grown
        self._grown = {
            path: held
            for path, held in self._read().items()
            if (self._grown is None or path in before)
            and held.num_bytes - before.get(path, Held()).num_bytes >= least_bytes
        }
        self._last_step = step
        num_steps = max(1, step - self._first_step)
        return {
            path: (held, (held.num_bytes - self._first.get(path, Held()).num_bytes) // num_steps)
            for path, held in self._grown.items()
        }


def as_holders(grown: Mapping[str, tuple[Held, int]]) -> list[Holder]:
    """Return what :meth:`GrowingAttributes.look` has found as holders."""
    kind = {"has_graph": False, "is_metric": False, "is_bounded": False, "is_measured": True}
    return [Holder(path, held.container, held.num_items, 0, **kind) for path, (held, _) in grown.items()]
