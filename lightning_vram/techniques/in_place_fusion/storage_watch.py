"""Watch every operator that reads or writes a piece of memory, and whether anybody still holds it.

What is folded, fused or overwritten must belong to those who do it. A dispatch mode sees every operator on a storage;
a weak reference to the tensor that was handed over tells whether it outlives the module it was for. Who makes use of
it: ``links.py``, ``inplace_activations.py``.

What it costs: Python for every operator while it is entered, no memory. What it does not see: numpy, DLPack and
kernels launched by address, unless they hold the tensor; the inside of compiled code.
"""

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.core.hooks.mode import QuietMode
from lightning_vram.core.hooks.moment import is_in_backward
from lightning_vram.core.operators.families import iterate_written
from lightning_vram.core.tensors.by_storage import ByStorage
from lightning_vram.core.tensors.versions import storage_address
from lightning_vram.private_names.torch.operator_calls import call_operator
from lightning_vram.private_names.torch.trees import tree_leaves
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation


class Memory:
    """What was seen of one storage: by whom it was made, read, written, and whether anybody could read it later."""

    def __init__(self, number: int) -> None:
        self.number = number  # in the order of making
        self.num_reads = 0
        self.num_writes = 0
        self.is_open = False  # a module was given it and runs: it may do what it likes
        self.is_seen_by_hook = False
        self.is_read_by_others_backward = False
        self._tensor: weakref.ref[Tensor] | None = None
        self.is_given = False
        self._num_before = 0

    def expect(self, tensor: Tensor) -> None:
        """Forget how it was made; count from here."""
        self._tensor = weakref.ref(tensor)
        self.num_reads = self.num_writes = 0

    def is_expected(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the very one of :meth:`expect`."""
        return self._tensor is not None and self._tensor() is tensor

    def give(self, tensor: Tensor) -> None:
        """Note that ``tensor`` is given to the one module that may have it."""
        self._tensor = weakref.ref(tensor)
        self._num_before = self.num_reads + self.num_writes
        self.is_given = self.is_open = True

    def touch(self, *, is_write: bool) -> None:
        """Note an operator of the forward."""
        if not self.is_open:
            self.num_writes += is_write
            self.num_reads += not is_write

    def touch_in_backward(self) -> None:
        """Note an operator of the backward. The module's own reads what it saved: an alias. Others saved the tensor."""
        self.is_read_by_others_backward |= self.is_given and self.is_held()

    def is_held(self) -> bool:
        """Whether the tensor that was given to the module still lives: another than the module holds it."""
        return self._tensor is not None and self._tensor() is not None

    def is_touched_again(self) -> bool:
        """Whether it was read or written after the module had it."""
        return self.is_open or self.is_read_by_others_backward or self.num_reads + self.num_writes != self._num_before

    def is_given_up(self) -> bool:
        """Whether nobody but the module it was given to has seen it, or ever can."""
        return self.is_given and not (self.is_touched_again() or self.is_seen_by_hook or self.is_held())


class StorageWatch(QuietMode):
    """Keeps a :class:`Memory` of every storage that an operator makes while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: ByStorage[Memory] = ByStorage()
        self._has_collected = False
        self.num_made = 0

    def find(self, tensor: Tensor) -> Memory | None:
        """Return what was seen of the memory of ``tensor``; ``None`` if it was not made while this was entered."""
        return self._memories.find(tensor)

    def hand_over(self, tensor: Tensor, memory: Memory) -> Tensor:
        """Return an alias of ``tensor`` for the one module that may have it, so that ``tensor`` itself can die.

        Autograd keeps what a module saves alive, Python object included. With an alias in the module, ``tensor`` lives
        on only if somebody else has it.
        """
        memory.give(tensor)
        with self.paused():
            alias: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
        return alias

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return call_operator(func, args, kwargs)
        written = {storage_address(tensor) for tensor in iterate_written(func, args, kwargs)}
        read = {storage_address(tensor): tensor for tensor in tensors_in((args, kwargs))}
        known = {address: memory for address, tensor in read.items() if (memory := self.find(tensor)) is not None}
        if known and not _is_recomputing():
            self._touch(known, written)
        result = call_operator(func, args, kwargs)
        for tensor in tensors_in(result):
            if storage_address(tensor) not in read:
                self.num_made += 1
                self._memories.note(tensor, Memory(self.num_made))
        return result

    def _touch(self, memories: dict[int, Memory], written: set[int]) -> None:
        if not is_in_backward():
            for address, memory in memories.items():
                memory.touch(is_write=address in written)
            return
        if not self._has_collected:  # the forward is over: what is held now is held on purpose, or by a cycle
            self._has_collected = True
            collect_cycles(self._memories.values())
        for memory in memories.values():
            memory.touch_in_backward()


class _Alias(torch.autograd.Function):
    """The same numbers in the same memory, as another tensor."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(_: Any, tangent: Tensor) -> Tensor:
        return tangent


def collect_cycles(memories: Iterable[Memory]) -> None:
    """Let tensors die that nothing but a reference cycle holds."""
    if any(memory.is_given and memory.is_held() for memory in memories):
        gc.collect()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Find the tensors in a tree of arguments or results."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _is_recomputing() -> bool:
    """Whether our own recomputation runs an operator again: the first run of it was seen."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == Recomputation.__module__:
            return True
        frame = frame.f_back
    return False
