"""Stages that take over what autograd saves for backward."""

import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_vram.core.hooks.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.core.hooks.stepping_aside import stepping_aside
from lightning_vram.core.hooks.unfinished_saves import saving
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES, PLAIN_TYPES
from lightning_vram.core.tensors.versions import alias, check_version, is_strided, storage_address, version_counter
from lightning_vram.private_names.torch.autocast import without_autocast
from lightning_vram.private_names.torch.autograd import hide_warning_of_hooks
from lightning_vram.private_names.torch.dispatch import TorchDispatchMode
from lightning_vram.private_names.torch.tensors import base_of, is_view, num_writes


class Taken(ABC):
    """A tensor that a stage took over: a snapshot, which later writes to the tensor do not reach."""

    __slots__ = ("__weakref__",)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes it keeps on the device of the tensor."""

    @property
    def is_snapshot(self) -> bool:
        """Whether it is complete yet: a tensor may be copied a moment later, when its operator has written it."""
        return True

    @property
    def is_exact(self) -> bool:
        """Whether it returns the tensor bit-exactly."""
        return True

    def before_write(self) -> None:
        """Called before the tensor is written to, on the current stream, by a stage that goes on reading this."""
        return

    @abstractmethod
    def give(self) -> Tensor:
        """Return the tensor with its shape, strides, dtype and device, as often as it is called. Without gradients."""


class _Chain(threading.local):
    def __init__(self) -> None:
        self.stages: list[SavedTensorStage] = []  # entered in this thread, innermost last
        self.exactness = 0


_chain = _Chain()


def innermost_stage() -> "SavedTensorStage | None":
    """Return the stage that autograd calls; a stage that is entered now would pass tensors to it."""
    return _chain.stages[-1] if _chain.stages else None


class _ExactOnly:
    def __enter__(self) -> None:
        _chain.exactness += 1

    def __exit__(self, *args: object) -> None:
        _chain.exactness -= 1


exact_only = _ExactOnly()
"""Let no stage take anything with a loss inside the block: a layer is going to be run again on it."""


def is_exact_only() -> bool:
    """Whether tensors that are saved now must come back bit-exactly."""
    return _chain.exactness > 0


class SavedTensorStage(ABC):
    """Takes over what autograd saves, and what stages inside of it keep, while it is entered.

    Enter it around a forward, or a whole training step; leave it before the backward, or not. It can be entered again,
    once at a time. Never offered to :meth:`take`: parameters, buffers of ``module``, views of either (they stay alive
    anyway), sparse, nested and wrapped tensors.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = module
        self._buffers: set[int] = set()  # addresses of their storages
        self._exit: ExitStack | None = None
        self._next: SavedTensorStage | None = None

    @abstractmethod
    def take(self, tensor: Tensor) -> Taken | None:
        """Take a tensor over, or return ``None`` to leave it in place.

        A stage passes what it makes of the tensor on with :meth:`hand_on`, also a tensor that it does not want.
        """

    def hand_on(self, tensor: Tensor) -> Taken | None:
        """Offer ``tensor`` to the next stage outside of this one; ``None`` if none takes it."""
        return self._next.take(tensor) if self._next is not None else None

    def begin(self, stack: ExitStack) -> TorchDispatchMode | None:
        """Enter, on ``stack``, what else is needed; return the dispatch mode in it, if any, to be off in backwards."""
        return None

    def __enter__(self) -> Self:
        if self._exit is not None:
            raise RuntimeError(f"this {type(self).__name__} is already active and cannot be nested.")
        module = self._module
        self._buffers = {storage_address(buffer) for buffer in module.buffers()} - {0} if module is not None else set()
        self._next = innermost_stage()
        hide_warning_of_hooks()
        with ExitStack() as stack:
            hooks = saved_tensors_hooks(self._pack, self._unpack)
            stack.enter_context(hooks)
            _chain.stages.append(self)
            stack.callback(_chain.stages.remove, self)
            mode = self.begin(stack)
            stack.enter_context(stepping_aside(hooks, mode))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *args: object) -> None:
        stack, self._exit = self._exit, None
        if stack is not None:
            stack.close()

    @hide_from_dynamo
    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) in PLAIN_TYPES and is_strided(tensor) and not self._is_lasting(tensor):
            with torch.no_grad(), without_autocast(), saving(tensor):
                taken = self.take(tensor)
            if taken is not None:
                return version_counter(tensor), num_writes(tensor), taken, tensor.shape
        return pack_in_place(tensor)

    @hide_from_dynamo
    def _unpack(self, packed: Any) -> Tensor:
        return unpack(packed)

    def _is_lasting(self, tensor: Tensor) -> bool:
        """Whether its memory is that of a parameter or buffer, and stays whether it is saved or not."""
        base = base_of(tensor) if is_view(tensor) else tensor
        return type(base) in PARAMETER_CLASSES or storage_address(tensor) in self._buffers


def pack_in_place(tensor: Tensor) -> Any:
    """Save a tensor as autograd would; see :func:`unpack`."""
    kind = type(tensor)
    if kind in PARAMETER_CLASSES:
        return tensor, num_writes(tensor)  # itself: FSDP refills the memory of parameters
    if kind not in PLAIN_TYPES or not is_strided(tensor):
        return tensor.detach() if tensor.grad_fn is not None else tensor
    return tensor if tensor.is_leaf else alias(tensor), num_writes(tensor)


def unpack(packed: Any) -> Tensor:
    """Return a saved tensor. Raises ``RuntimeError`` as autograd does if it was overwritten since."""
    if isinstance(packed, Tensor):
        return packed
    counter, version, *_ = packed
    if num_writes(counter) != version:
        check_version(counter, version, packed[3] if len(packed) > 2 else counter.shape)
    if len(packed) == 2:
        saved: Tensor = counter
        return saved
    taken: Taken = packed[2]
    with torch.no_grad(), without_autocast():
        return taken.give()
