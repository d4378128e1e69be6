"""The values that are known in one run, by tensor and by memory, and what happens to them when memory is written to."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_vram.core.tensors.versions import NO_VERSION, storage_address, version_of
from lightning_vram.private_names.torch.tensors import count_storage_users, num_writes, storage_identity
from lightning_vram.techniques.in_place_fusion.recomputation.kept import Kept
from lightning_vram.techniques.in_place_fusion.recomputation.recipes import Recipe, Value


class NotedValues:
    """Finds the value of a tensor, and sees to it that no value is taken for what it was before a write."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}  # by id of the tensor, which may be gone and its id be another's
        self._new: list[Value] = []  # not yet in the next
        self._by_address: dict[int, list[Value]] = {}
        self._kept: dict[int, list[weakref.ref[Kept]]] = {}  # by address of the storage; outlive the run

    def clear(self) -> None:
        """Forget the values of this run. What is still kept for a backward stays watched."""
        self._values.clear()
        self._new.clear()
        self._by_address.clear()
        alive = {address: [ref for ref in refs if ref() is not None] for address, refs in self._kept.items()}
        self._kept = {address: refs for address, refs in alive.items() if refs}

    def find(self, tensor: Tensor) -> Value | None:
        """Return the value of ``tensor`` as it is now, if it is known."""
        value = self._values.get(id(tensor))
        if value is None or value() is not tensor or value.version == NO_VERSION:
            return None
        # Not by way of version_of() and storage_address(): this runs for every argument of every cheap operator.
        if value.version != num_writes(tensor) or (value.address and value.address != storage_identity(tensor)):
            return None  # written to, or its ``.data`` set
        return value

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value of ``tensor`` as it is now."""
        value = self.find(tensor)
        if value is None:
            return self.note(tensor, None, version_of(tensor))
        if value.is_copy:
            value.recipe = None
        return value

    def note(
        self,
        tensor: Tensor,
        recipe: Recipe | None,
        version: int,
        index: int = 0,
        on_death: Callable[[Any], None] | None = None,
        kind: type[Value] = Value,
    ) -> Value:
        """Make the value of ``tensor``, which is result number ``index`` of ``recipe``, and remember it."""
        value = kind(tensor, on_death)
        value.recipe = recipe
        value.index = index
        value.version = version
        value.address = storage_address(tensor)
        value.kept = value.dropped = None
        self._values[id(tensor)] = value
        self._new.append(value)
        return value

    def watch(self, value: Value, kept: Kept) -> None:
        """Remember that ``kept`` holds ``value``, and protect it from writes once a recipe ends on it."""
        value.kept = weakref.ref(kept)
        self._kept.setdefault(value.address, []).append(value.kept)

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether something on the memory of ``tensor`` is kept, or was."""
        return storage_address(tensor) in self._kept

    def before_write(self, target: Tensor) -> None:
        """Save what recipes end on, and forget what other tensors on the memory of ``target`` hold."""
        address = storage_address(target)
        num_known = 1  # the target itself
        for reference in self._kept.get(address, ()):
            kept = reference()
            if kept is not None:
                num_known += kept.holds_memory and kept.tensor is not target
                kept.before_write()
        if address and count_storage_users(address) > num_known:
            self._sort_in()
            for value in self._by_address.pop(address, ()):
                if value() is not target:
                    value.version = NO_VERSION

    def forget(self, tensor: Tensor) -> None:
        """Do not take ``tensor`` for what it was, whatever its version says."""
        value = self._values.pop(id(tensor), None)
        if value is not None:
            value.version = NO_VERSION

    def _sort_in(self) -> None:
        for value in self._new:
            self._by_address.setdefault(value.address, []).append(value)
        self._new.clear()
