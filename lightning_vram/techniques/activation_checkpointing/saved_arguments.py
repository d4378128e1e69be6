"""Save the arguments of a layer until it is recomputed.

Tensors count as inputs wherever they are passed, and are saved as autograd saves them, under the hooks that are set.
Objects of the caller (graphs, dot dicts, configurations) are copied with the containers and objects in them, so that
only the first run writes to them. Tensors above 64 KiB in them are shared; overwriting one before the backward is an
error, as for inputs. Objects without a ``__dict__``, and objects after the first thousand, are shared.
"""

import copy
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from operator import ne
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.hooks import SavedOutput, save
from lightning_vram.core.module_state import differs
from lightning_vram.core.rollback import SAVED_COPY_BYTES, writable_copy
from lightning_vram.core.tensors.properties import PLAIN_TYPES, flatten_arguments, num_bytes_of
from lightning_vram.memory.storages import iterate_storages, version_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class SavedArguments:
    """The arguments of a call; ``overwrites_inputs``: whether the layer writes to them, ``None`` if not known."""

    def __init__(self, arguments: Arguments, overwrites_inputs: bool | None) -> None:  # noqa: FBT001 - three states
        self._leaves, self._rebuild = flatten_arguments(arguments)
        objects = _Copies()
        self._values = [
            _keep(leaf, overwrites_inputs) if isinstance(leaf, Tensor) else objects.copy(leaf) for leaf in self._leaves
        ]
        self._inner = [(one, version_of(one)) for one in objects.tensors.values()]  # tensors in objects
        self._versions = [version_of(leaf) if isinstance(leaf, Tensor) else 0 for leaf in self._leaves]
        # What the caller has put on each tensor, as ``tensor.name = ...`` does.
        self._attributes = [dict(vars(leaf)) if type(leaf) in PLAIN_TYPES else {} for leaf in self._leaves]

    def devices(self) -> set[torch.device]:
        """Return the devices of the tensors, before :meth:`settle`."""
        return {leaf.device for leaf in self._leaves if isinstance(leaf, Tensor)}

    def are_overwritten(self) -> bool:
        """Whether one was written to since."""
        now = (version_of(leaf) if isinstance(leaf, Tensor) else 0 for leaf in self._leaves)
        return any(map(ne, self._versions, now)) or any(
            value.is_overwritten() for value in self._values if isinstance(value, _FirstInput)
        )

    def share_memory(self) -> bool:
        """Whether several of them lie in one piece of memory."""
        tensors = (leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        storages = [id(storage) for tensor in tensors for storage, _ in iterate_storages(tensor)]
        return len(set(storages)) < len(storages)

    def overwrites_inside(self) -> bool:
        """Whether a tensor in an object was written to since."""
        return any(version_of(one) != version for one, version in self._inner)

    def settle(self) -> None:
        """Call after the layer's forward: keeps what the second run needs, under the hooks that are set."""
        for value in self._values:
            if isinstance(value, _FirstInput):
                value.settle()
        self._leaves, self._versions = [], []

    def give(self, *, is_overwritten: bool | None) -> Arguments:
        """Return what the second run gets; copies where it overwrites them, since a retained graph needs them again."""
        for one, version in self._inner:
            if version_of(one) != version:
                raise _overwritten(one.shape)
        objects = _Copies()
        leaves = []
        for value in self._values:
            if isinstance(value, _Input | _FirstInput):
                tensor = value.read()
                leaves.append(tensor.clone() if is_overwritten else tensor)
            else:
                leaves.append(objects.copy(value))
        for leaf, attributes in zip(leaves, self._attributes, strict=True):
            if attributes and not vars(leaf):  # a new object: a copy, or what saved-tensor hooks gave back
                vars(leaf).update(attributes)
        arguments: Arguments = self._rebuild(leaves)
        return arguments


def _keep(leaf: Tensor, overwrites_inputs: bool | None) -> Any:  # noqa: FBT001
    if leaf.is_inference():
        return _Input(lambda: leaf)  # cannot be saved for a backward, and cannot change
    if overwrites_inputs is None:
        return _FirstInput(leaf)
    return _Input(save(writable_copy(leaf) if overwrites_inputs else leaf))


class _Input:
    """A tensor, and what gives it back."""

    __slots__ = ("read",)

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self.read = read


class _FirstInput:
    """A tensor in a layer's first call, which may overwrite it: it and a copy are kept until that is known."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._version = version_of(tensor)
        self._copy: Tensor | None = writable_copy(tensor)  # what the layer found
        self._shape, self._requires_grad = tensor.shape, tensor.requires_grad
        self._saved: SavedOutput | None = None

    def is_overwritten(self) -> bool:
        """Whether it was written to since."""
        return version_of(self._now) != self._version or differs(self._now, self._copy)

    def settle(self) -> None:
        """Call after the layer's forward: keeps what the second run needs, under the hooks that are set."""
        needed = self._copy if self._copy is not None and self.is_overwritten() else self._now
        self._saved = SavedOutput(needed.detach())
        self._tensor = self._copy = None

    def read(self) -> Tensor:
        """Return what the layer found. Raises ``RuntimeError``, as autograd does, if it was overwritten since."""
        tensor = self._saved.give() if self._saved is not None else self._now
        if tensor is None:
            raise _overwritten(self._shape)
        return tensor.detach().requires_grad_(self._requires_grad)

    @property
    def _now(self) -> Tensor:
        assert self._tensor is not None
        return self._tensor


def _overwritten(shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"an input of shape {list(shape)} of a layer that is recomputed."
    )


_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_NOT_DATA = (nn.Module, type, Enum, FunctionType, MethodType, ModuleType, partial)
_CONTAINERS = (dict, list, deque, set)
_MAX_ITEMS = 1000
_MAX_DEPTH = 16


class _Copies:
    """Copies of objects, each made once, with the containers and objects in them. What cannot be copied is shared."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}  # large ones that were found, by ``id``. They are shared.
        self._made: dict[int, Any] = {}

    def copy(self, value: Any, depth: int = 0) -> Any:
        """Return a copy of ``value``, or itself."""
        if type(value) in _PLAIN or id(value) in self._made or len(self._made) >= _MAX_ITEMS or depth > _MAX_DEPTH:
            return self._made.get(id(value), value)
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if type(value) is tuple:
            return tuple(self.copy(item, depth + 1) for item in value)
        has_attributes = bool(type(value).__dictoffset__ and not isinstance(value, _NOT_DATA) and vars(value))
        if not (has_attributes or isinstance(value, _CONTAINERS)) or hasattr(type(value), "__del__"):
            return value
        with suppress(Exception):  # of code of others
            self._made[id(value)] = copy.copy(value)
        twin = self._made.get(id(value), value)
        if twin is value:  # cannot be copied, or returns itself, as a logger does
            return value
        if has_attributes and not hasattr(type(value), "__copy__"):  # such a class knows what belongs to a copy
            self._copy_items(vars(twin), depth + 1)
        self._copy_items(twin, depth + 1)
        return twin

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and num_bytes_of(tensor) <= SAVED_COPY_BYTES and not tensor.is_inference():
            return self._made.setdefault(id(tensor), writable_copy(tensor))  # type: ignore[no-any-return]
        self.tensors[id(tensor)] = tensor
        return tensor

    def _copy_items(self, twin: Any, depth: int) -> None:
        if isinstance(twin, dict):  # past methods of its own: dot dicts have some
            for key, item in dict.items(twin):
                dict.__setitem__(twin, key, self.copy(item, depth))
        elif isinstance(twin, list | deque):
            kind: Any = list if isinstance(twin, list) else deque
            for place, item in enumerate(twin):
                kind.__setitem__(twin, place, self.copy(item, depth))
