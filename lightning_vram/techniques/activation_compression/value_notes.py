"""Record facts about the values of a few operators' results while the operators run.

Indices have a bound, masks have two values, and what a backward magnifies an error of must stay exact. A note belongs
to the memory of a tensor, is weak, and holds as long as nothing was written there: neither by the version that autograd
counts nor by an operator seen here, which includes writes that count no version (foreach and fused operators, writes to
``.data``). NumPy and kernels that bypass PyTorch are seen by neither: on the CPU, where NumPy can write, readers of a
note check the values.

Cost: a Python call and one dictionary lookup per operator.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.core.hooks import SeenWrites, count_foreach_writes
from lightning_vram.core.operators import (
    LARGEST_INDEX,
    exact_arguments,
    iterate_tensors,
    iterate_written,
    written_arguments,
)
from lightning_vram.core.tensors.properties import PLAIN_TYPES
from lightning_vram.memory.storages import ByStorage, version_of
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.private_names.dispatcher import OpOverload

aten = torch.ops.aten


@dataclass(slots=True)
class _Note:
    dtype: torch.dtype
    version: int
    largest: int | None  # index; None: two values

    def is_true_of(self, tensor: Tensor) -> bool:
        return self.version == version_of(tensor) and self.dtype is tensor.dtype


class ValueNotes(OperatorSubscriber):
    """Notes what is known about results of operators while it is entered."""

    def __init__(self, *, notes_exact: bool) -> None:
        self._notes_exact = notes_exact  # whether to tell, too, what must not be stored with an error
        self._notes: ByStorage[_Note] = ByStorage()
        self._last_clone: weakref.ref[Tensor] | None = None
        self.writes = SeenWrites()
        self.on_exact_argument: Callable[[Tensor], None] | None = None
        """Called with tensors that a backward will need exactly, if it saved them."""

    def clear(self) -> None:
        """Forget everything."""
        self.on_exact_argument = None
        self.writes.clear()
        self._notes.clear()

    def largest_index(self, tensor: Tensor) -> int | None:
        """Return the largest value that the memory of ``tensor`` can hold, if it holds indices as they were made."""
        note = self._notes.find(tensor)
        return note.largest if note is not None and note.is_true_of(tensor) else None

    def may_be_two_valued(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` was made as a mask, and scaled at most."""
        note = self._notes.find(tensor)
        return note is not None and note.largest is None and note.is_true_of(tensor)

    @override
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        handler = (_handler_of_all if self._notes_exact else _handler_of)(func)
        if handler is None:
            return self.run(func, (), args, kwargs)
        return handler(self, func, args, kwargs)

    def _note(self, tensor: Tensor, version: int, largest: int | None = None) -> None:
        if type(tensor) in PLAIN_TYPES:
            self._notes.note(tensor, _Note(tensor.dtype, version, largest))

    def _note_write(self, targets: Iterable[Tensor]) -> None:
        for target in targets:
            self._notes.drop(target)
            self.writes.add(target)

    # Handlers. Each runs the operator and returns what it returns.

    def _noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Drawing a mask, or giving indices as its last result."""
        results = self.run(func, (), args, kwargs)
        result = results if isinstance(results, Tensor) else results[-1]
        largest = LARGEST_INDEX.get(func)
        self._note(result, version_of(result), largest(args, kwargs) if largest is not None else None)
        return results

    def _mask_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Drawing a mask, or adding to one or scaling it."""
        target = args[0]
        is_mask = func in _DRAWING or (
            self.may_be_two_valued(target) and (not isinstance(args[1], Tensor) or args[1].dim() == 0)
        )
        self._note_write((target,))
        result = self.run(func, (), args, kwargs)
        if is_mask and target.nbytes == target.untyped_storage().nbytes():
            self._note(target, version_of(target) + 1)  # autograd counts the write after this returns
        return result

    def _writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        self._note_write(iterate_written(func, args, kwargs))
        results = self.run(func, (), args, kwargs)
        count_foreach_writes(func, args, kwargs)
        return results

    def _foreign(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Operators of extensions, which may write without saying so."""
        self._note_write(iterate_tensors((*args, *(kwargs or {}).values())))
        return self.run(func, (), args, kwargs)

    def _telling(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Needing arguments exactly in its backward, or ``clone``."""
        wanted = exact_arguments(func)
        if wanted is not None and self.on_exact_argument is not None and torch.is_grad_enabled():
            target = args[0] if written_arguments(func) else None
            for tensor in wanted(args, kwargs):
                clone = self._last_clone() if tensor is target and self._last_clone is not None else tensor
                if clone is not None and clone.shape == tensor.shape:  # in place: autograd has saved a copy
                    self.on_exact_argument(clone)
        handler = _handler_of(func)
        results = handler(self, func, args, kwargs) if handler is not None else self.run(func, (), args, kwargs)
        if func is aten.clone.default:
            self._last_clone = weakref.ref(results)
        return results


_Handler = Callable[[ValueNotes, Any, tuple[Any, ...], dict[str, Any] | None], Any]
_DRAWING = frozenset([aten.bernoulli_.float, aten.bernoulli_.Tensor])
_IN_PLACE = [getattr(aten, name) for name in ("add_", "sub_", "mul_", "div_")]
_OF_VALUES: dict[Any, _Handler] = {
    **dict.fromkeys([*LARGEST_INDEX, aten.bernoulli.default, aten.bernoulli.p], ValueNotes._noted),
    **dict.fromkeys(_DRAWING, ValueNotes._mask_in_place),
    **dict.fromkeys([overload for f in _IN_PLACE for overload in (f.Tensor, f.Scalar)], ValueNotes._mask_in_place),
}


@cache
def _handler_of(func: Any) -> _Handler | None:
    """Return what handles ``func``; ``None`` if there is nothing to note."""
    if not isinstance(func, OpOverload):
        return None  # a higher-order operator
    if func not in _OF_VALUES and func.namespace not in ("aten", "prim", "prims", "profiler"):
        return ValueNotes._foreign
    return _OF_VALUES.get(func, ValueNotes._writing if written_arguments(func) else None)


@cache
def _handler_of_all(func: Any) -> _Handler | None:
    """Return what handles ``func`` where what is needed exactly is told, too."""
    handler = _handler_of(func)
    if not isinstance(func, OpOverload) or handler is ValueNotes._foreign:
        return handler
    return ValueNotes._telling if func is aten.clone.default or exact_arguments(func) is not None else handler
