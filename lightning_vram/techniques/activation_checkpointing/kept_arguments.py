"""What stays of a layer's arguments until it runs again.

Tensors count as inputs wherever they are passed, by keyword or deep inside: they are kept as autograd keeps them, under
the hooks that are set, and one that is overwritten before the backward is an error. The objects and containers of the
caller are written by the first run only.
"""

import copy
from enum import Enum
from operator import ne
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.hooks.saved_output import SavedOutput, save
from lightning_vram.core.rollback.buffer_copies import differs
from lightning_vram.core.tensors.nests import flatten_arguments
from lightning_vram.core.tensors.parameter_classes import PLAIN_TYPES
from lightning_vram.core.tensors.versions import version_of
from lightning_vram.memory.tracking.storages import iterate_storages

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class KeptArguments:
    """The arguments of a call.

    Args:
        arguments: Of the call.
        overwrites_inputs: Whether the layer writes to its inputs; ``None`` before its first call.
    """

    def __init__(self, arguments: Arguments, overwrites_inputs: bool | None) -> None:  # noqa: FBT001 - three states
        self._leaves, self._rebuild = flatten_arguments(arguments)
        self._values = [_keep(leaf, overwrites_inputs) for leaf in self._leaves]
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
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        storages = [id(storage) for tensor in tensors for storage, _ in iterate_storages(tensor)]
        return len(set(storages)) < len(storages)

    def settle(self) -> None:
        """Call after the layer's forward: keeps what the second run needs, under the hooks that are set."""
        for value in self._values:
            if isinstance(value, _FirstInput):
                value.settle()
        self._leaves, self._versions = [], []

    def give(self, *, is_overwritten: bool | None) -> Arguments:
        """Return what the second run gets.

        Args:
            is_overwritten: Whether it must not get what is kept: a retained graph needs it again.
        """
        leaves = [_give(value, is_overwritten=is_overwritten) for value in self._values]
        arguments: Arguments = self._rebuild(list(map(_give_attributes, leaves, self._attributes)))
        return arguments


def _keep(leaf: Any, overwrites_inputs: bool | None) -> Any:  # noqa: FBT001
    if not isinstance(leaf, Tensor):
        return _copy_object(leaf)
    if leaf.is_inference():
        return _InferenceInput(leaf)  # cannot be saved for a backward, and cannot change
    if overwrites_inputs is None:
        return _FirstInput(leaf)
    return _Input(_copy_tensor(leaf) if overwrites_inputs else leaf)


def _give(value: Any, *, is_overwritten: bool | None) -> Any:
    if not isinstance(value, _Input | _FirstInput | _InferenceInput):
        return _copy_object(value)
    tensor = value.read()
    return tensor.clone() if is_overwritten else tensor


def _give_attributes(leaf: Any, attributes: dict[str, Any]) -> Any:
    """A copy, or what saved-tensor hooks gave back, is a new object."""
    if attributes and not vars(leaf):
        vars(leaf).update(attributes)
    return leaf


class _Input:
    """A tensor that is kept as it is."""

    __slots__ = ("read",)

    def __init__(self, tensor: Tensor) -> None:
        self.read = save(tensor)


class _InferenceInput:
    """A tensor that autograd does not save."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def read(self) -> Tensor:
        return self._tensor


class _FirstInput:
    """A tensor in a layer's first call, which may overwrite it: an in-place activation comes first in some layers.

    Neither the tensor nor a copy alone will do: the tensor may be gone after the call, and copies of all inputs of all
    layers may not fit. So both are kept while the layer runs, and the one that is needed from then on.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._version = version_of(tensor)
        self._copy: Tensor | None = _copy_tensor(tensor)  # what the layer found
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
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"an input of shape {list(self._shape)} of a layer that is recomputed."
            )
        return tensor.detach().requires_grad_(self._requires_grad)

    @property
    def _now(self) -> Tensor:
        assert self._tensor is not None
        return self._tensor


def _copy_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _copy_object(leaf: Any) -> Any:
    """A shallow copy of an object that carries data, such as a graph or a dataclass; anything else as it is."""
    is_data = (
        hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor | nn.Module | type | Enum) and not callable(leaf)
    )
    if not is_data:
        return leaf
    try:
        return copy.copy(leaf)
    except Exception:  # an object that cannot be copied is used as it is
        return leaf
