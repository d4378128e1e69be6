"""Record facts about the values of a few operators' results while the operators run.

Indices have a bound, masks have two values, and statistics and copies of weights must stay exact. A note belongs to the
memory of a tensor, is weak, and holds as long as nothing was written there: neither by the version that autograd counts
nor by an operator seen here, which includes writes that count no version (foreach and fused operators, writes to
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
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.core import operators
from lightning_vram.core.hooks import count_foreach_writes
from lightning_vram.core.tensors.properties import PLAIN_TYPES
from lightning_vram.memory.storages import ByStorage, storage_address, version_of
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.private_names.dispatcher import OpOverload, schema_of
from lightning_vram.private_names.torch import base_of, is_view, tensors_in

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
        self._notes_exact = notes_exact  # whether to note, too, what must not be stored with an error
        self._notes: ByStorage[_Note] = ByStorage()
        self._last_clone: weakref.ref[Tensor] | None = None
        self.listener: Any = None
        """Hears of tensors that are about to be written to, and that a backward will need exactly, if it saved them."""
        self.buffers: frozenset[int] = frozenset()
        """Addresses of the storages of weights that are no parameters."""
        # What must not get an error. What is made of statistics element by element (``std.clamp(min=eps)``) is one,
        # too; a product of a statistic with a weight matrix is an ordinary activation.
        self._is_weight: ByStorage[bool] = ByStorage()  # made of weights alone; or a statistic

    def clear(self) -> None:
        """Forget everything."""
        self.listener = None
        self._notes.clear()
        self._is_weight.clear()

    def largest_index(self, tensor: Tensor) -> int | None:
        """Return the largest value that the memory of ``tensor`` can hold, if it holds indices as they were made."""
        note = self._notes.find(tensor)
        return note.largest if note is not None and note.is_true_of(tensor) else None

    def may_be_two_valued(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` was made as a mask, and scaled at most."""
        note = self._notes.find(tensor)
        return note is not None and note.largest is None and note.is_true_of(tensor)

    def is_exact(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` must not get an error, if that was followed."""
        return self._is_weight.find(tensor) is not None

    @override
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        handler = (_handler_of_all if self._notes_exact else _handler_of)(func)
        if handler is None:
            return self.run(func, (), args, kwargs)
        return handler(self, func, args, kwargs)

    def _note(self, tensor: Tensor, version: int, largest: int | None = None) -> None:
        if type(tensor) in PLAIN_TYPES:
            self._notes.note(tensor, _Note(tensor.dtype, version, largest))

    def _note_write(self, targets: Iterable[Tensor], *, is_certain: bool = True) -> None:
        for target in targets:
            self._notes.drop(target)
            if self.listener is not None:
                self.listener.on_write(target, is_certain=is_certain)

    # Handlers. Each runs the operator and returns what it returns.

    def _noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Drawing a mask, or giving indices as its last result."""
        results = self.run(func, (), args, kwargs)
        result = results if isinstance(results, Tensor) else results[-1]
        largest = operators.LARGEST_INDEX.get(func)
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
        self._note_write(operators.iterate_written(func, args, kwargs))
        results = self.run(func, (), args, kwargs)
        count_foreach_writes(func, args, kwargs)
        return results

    def _foreign(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Operators of extensions, which may write without saying so."""
        self._note_write(operators.iterate_written(func, args, kwargs))
        tensors = list(tensors_in((*args, *(kwargs or {}).values())))
        self._note_write(tensors, is_certain=False)
        for tensor in tensors:
            self._is_weight.drop(tensor)
        return self.run(func, (), args, kwargs)

    def _followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Any operator, where what is exact is noted."""
        wanted = operators.exact_arguments(func)
        if wanted is not None and self.listener is not None and torch.is_grad_enabled():
            target = args[0] if operators.written_arguments(func) else None
            for tensor in wanted(args, kwargs):
                clone = self._last_clone() if tensor is target and self._last_clone is not None else tensor
                if clone is not None and clone.shape == tensor.shape:  # in place: autograd has saved a copy
                    self.listener.on_exact_argument(clone)
        is_weight = self._are_results_weights(func, args, kwargs)
        handler = _handler_of(func)
        results = handler(self, func, args, kwargs) if handler is not None else self.run(func, (), args, kwargs)
        self._note_exact(func, results, is_weight)
        if func is aten.clone.default:
            self._last_clone = weakref.ref(results)
        return results

    def _are_results_weights(self, func: Any, args: Any, kwargs: dict[str, Any] | None) -> bool | None:
        """Return whether results are weights, or statistics; ``None``: neither. To be asked before the call."""
        kinds = set()
        for tensor in tensors_in((*args, *(kwargs or {}).values()) if kwargs else args):
            base = base_of(tensor) if is_view(tensor) else tensor
            is_weight = isinstance(base, nn.Parameter) or storage_address(tensor) in self.buffers
            kind = is_weight or self._is_weight.find(tensor)
            if kind is None and tensor.numel() != 1 and tensor.dtype is not torch.bool:
                return None
            kinds.add(kind)
        if False in kinds:
            return False if operators.is_pointwise(func) or operators.gives_exact_result(func) else None
        return True if True in kinds or (not kinds and operators.is_constant(func)) else None

    def _note_exact(self, func: Any, results: Any, is_weight: bool | None) -> None:  # noqa: FBT001
        exact: Any = ()
        if is_weight is not None or (operators.gives_exact_result(func) and isinstance(results, Tensor | list)):
            exact = (results,)
        elif isinstance(results, tuple | list) and _has_statistics(func):
            exact = results[0 if operators.gives_exact_result(func) else 1 :]
        elif operators.written_arguments(func):
            for tensor in tensors_in((results,)):
                self._is_weight.drop(tensor)  # in place: it was exact before
        for tensor in tensors_in(exact):
            if tensor.is_floating_point():
                self._is_weight.note(tensor, bool(is_weight))


_Handler = Callable[[ValueNotes, Any, tuple[Any, ...], dict[str, Any] | None], Any]
_DRAWING = frozenset([aten.bernoulli_.float, aten.bernoulli_.Tensor])
_IN_PLACE = [getattr(aten, name) for name in ("add_", "sub_", "mul_", "div_")]
_OF_VALUES: dict[Any, _Handler] = {
    **dict.fromkeys([*operators.LARGEST_INDEX, aten.bernoulli.default, aten.bernoulli.p], ValueNotes._noted),
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
    return _OF_VALUES.get(func, ValueNotes._writing if operators.written_arguments(func) else None)


@cache
def _handler_of_all(func: Any) -> _Handler | None:
    """Return what handles ``func`` where what is exact is noted, too."""
    handler = _handler_of(func)
    if not isinstance(func, OpOverload) or handler is ValueNotes._foreign:
        return handler
    # A view is of the same memory, for which the same is noted.
    gives_view = not operators.written_arguments(func) and any(
        r.alias_info is not None for r in schema_of(func).returns
    )
    return handler if gives_view else ValueNotes._followed


def _has_statistics(func: Any) -> bool:
    """Whether it gives several tensors that are no views: what comes after the first is for its backward."""
    returns = schema_of(func).returns
    return len(returns) > 1 and all(str(r.type) == "Tensor" and r.alias_info is None for r in returns[:2])
