"""Record facts about the values of a few operators' results while the operators run.

Indices have a bound, masks have two values, and statistics and copies of weights must stay exact. A note belongs to the
memory of a tensor, is weak, and holds as long as nothing was written there: neither by the version that autograd counts
nor by an operator seen here, which includes writes that count no version (foreach and fused operators, writes to
``.data``). NumPy and kernels that bypass PyTorch are seen by neither: on the CPU, where NumPy can write, readers of a
note check the values.

Cost: a Python call and one dictionary lookup per operator.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.core.hooks import count_writes
from lightning_vram.core.operators import (
    LARGEST_INDEX,
    exact_arguments,
    gives_exact_result,
    is_constant,
    is_pointwise,
    iterate_tensors,
    iterate_written,
    written_arguments,
)
from lightning_vram.core.tensors.properties import PLAIN_TYPES, ByStorage, storage_address, version_of
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.private_names.dispatcher import OpOverload, is_foreach, schema_of
from lightning_vram.private_names.torch import base_of, is_view


class Origin(Enum):
    """What an exact tensor was made of."""

    WEIGHTS = auto()
    STATISTICS = auto()


class ExactValues:
    """The exact tensors of a run, followed through operators.

    What is made of weights alone counts as a weight, what is made of statistics element by element
    (``std.clamp(min=eps)``) as a statistic. A product of a statistic with a weight matrix is an ordinary activation.
    """

    def __init__(self) -> None:
        self._origins: ByStorage[Origin] = ByStorage()
        self.lasting: frozenset[int] = frozenset()
        """Addresses of the storages of further weights: buffers."""

    def clear(self) -> None:
        """Forget everything."""
        self._origins.clear()

    def __contains__(self, tensor: Tensor) -> bool:
        return self._origins.find(tensor) is not None

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Note that somebody may have written anything to ``tensors``."""
        for tensor in tensors:
            self._origins.drop(tensor)

    def origin_of_results(self, function: Any, args: Any, kwargs: dict[str, Any] | None) -> Origin | None:
        """Return what the results of a call are made of, if of nothing else. To be asked before the call."""
        origins: set[Origin] = set()
        has_tensors = False
        for tensor in iterate_tensors((*args, *(kwargs or {}).values()) if kwargs else args):
            has_tensors = True
            origin = self._origin_of(tensor)
            if origin is not None:
                origins.add(origin)
            elif tensor.numel() != 1 and tensor.dtype is not torch.bool:  # which neither adds nor takes anything
                return None
        if not has_tensors:
            return Origin.WEIGHTS if is_constant(function) else None
        if Origin.STATISTICS in origins:
            return Origin.STATISTICS if is_pointwise(function) or gives_exact_result(function) else None
        return Origin.WEIGHTS if origins else None

    def note_results(self, function: Any, results: Any, origin: Origin | None) -> None:
        """Note what ``function`` returned."""
        if origin is not None:
            self._note(iterate_tensors((results,)), origin)
            return
        is_exact = gives_exact_result(function)
        if isinstance(results, Tensor | list) and is_exact:
            self._note(iterate_tensors((results,)), Origin.STATISTICS)
        elif written_arguments(function):
            self.drop(iterate_tensors((results,)))  # in place: it was exact before
        if isinstance(results, tuple | list) and has_statistics(function):
            self._note(results[0 if is_exact else 1 :], Origin.STATISTICS)

    def _origin_of(self, tensor: Tensor) -> Origin | None:
        base = base_of(tensor) if is_view(tensor) else tensor
        if isinstance(base, nn.Parameter) or storage_address(tensor) in self.lasting:
            return Origin.WEIGHTS
        return self._origins.find(tensor)

    def _note(self, tensors: Iterable[Any], origin: Origin) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._origins.note(tensor, origin)


def has_statistics(function: Any) -> bool:
    """Whether it gives several tensors that are no views: what comes after the first is for its backward."""
    returns = schema_of(function).returns
    return len(returns) > 1 and all(str(r.type) == "Tensor" and r.alias_info is None for r in returns[:2])


aten = torch.ops.aten


@dataclass(slots=True)
class _Note:
    dtype: torch.dtype
    version: int
    largest: int | None  # index; None: two values


class Listener(Protocol):
    """Gets events of operators."""

    def on_write(self, target: Tensor) -> None:
        """``target``, which is watched, is about to be written to."""

    def on_exact_argument(self, tensor: Tensor) -> None:
        """``tensor`` was saved, if it was, for an operator whose backward needs it exactly."""

    def on_activation(self, result: Tensor) -> None:
        """An activation that saves its own result has made it, and saves it next."""


class ValueNotes(OperatorSubscriber):
    """Notes what is known about results of operators while it is entered."""

    def __init__(self, *, notes_exact: bool) -> None:
        self._handlers = _HANDLERS[notes_exact]
        self._notes_exact = notes_exact  # whether to note, too, what must not be stored with an error
        self._notes: ByStorage[_Note] = ByStorage()
        self._num_writes: dict[int, int] = {}  # by address of the storage
        self._last_clone: weakref.ref[Tensor] | None = None
        self._listener: Listener | None = None
        self.exact_values = ExactValues()
        """What must not get an error; followed if ``notes_exact``."""

    @contextmanager
    def notifying(self, listener: Listener) -> Iterator[None]:
        """Tell ``listener`` inside the block."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def clear(self) -> None:
        """Forget everything."""
        self._notes.clear()
        self.exact_values.clear()
        self._num_writes.clear()

    def largest_index(self, tensor: Tensor) -> int | None:
        """Return the largest value that the memory of ``tensor`` can hold, if it holds indices as they were made."""
        note = self._find(tensor)
        return note.largest if note is not None else None

    def may_be_two_valued(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` was made as a mask, and scaled at most."""
        note = self._find(tensor)
        return note is not None and note.largest is None

    def watch(self, tensor: Tensor) -> int:
        """Count the writes to the memory of ``tensor`` from now on, or go on; return how many there were."""
        return self._num_writes.setdefault(storage_address(tensor), 0)

    def num_writes(self, tensor: Tensor) -> int | None:
        """Return how many writes to the memory of ``tensor`` were seen since it is watched; ``None`` if it is not."""
        return self._num_writes.get(storage_address(tensor))

    @override
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        handler = self._handlers.get(func, _UNKNOWN)
        if handler is _UNKNOWN:
            handler = self._handlers[func] = _choose_handler(func, notes_exact=self._notes_exact)
        if handler is None:
            return self.run(func, (), args, kwargs)
        return handler(self, func, args, kwargs)

    def _find(self, tensor: Tensor) -> _Note | None:
        note = self._notes.find(tensor)
        is_true = note is not None and note.version == version_of(tensor) and note.dtype is tensor.dtype
        return note if is_true else None

    def _note(self, tensor: Tensor, version: int, largest: int | None = None) -> None:
        if type(tensor) in PLAIN_TYPES:
            self._notes.note(tensor, _Note(tensor.dtype, version, largest))

    def _note_write(self, targets: Iterable[Tensor], *, is_certain: bool = True) -> None:
        for target in targets:
            self._notes.drop(target)
            address = storage_address(target)
            if address in self._num_writes:
                if is_certain and self._listener is not None:
                    self._listener.on_write(target)
                self._num_writes[address] += 1

    # Handlers. Each runs the operator and returns what it returns.

    def _indexed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        results = self.run(func, (), args, kwargs)
        indices = results if isinstance(results, Tensor) else results[-1]
        self._note(indices, version_of(indices), LARGEST_INDEX[func](args, kwargs))
        return results

    def _mask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        result = self.run(func, (), args, kwargs)
        self._note(result, version_of(result))
        return result

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
        targets = list(iterate_written(func, args, kwargs))
        self._note_write(targets)
        results = self.run(func, (), args, kwargs)
        if is_foreach(func):
            count_writes(targets)
        return results

    def _activation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        result = self._writing(func, args, kwargs)
        if self._listener is not None:
            self._listener.on_activation(result)
        return result

    def _foreign(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Operators of extensions, which may write without saying so."""
        self._note_write(iterate_written(func, args, kwargs))
        tensors = list(iterate_tensors((*args, *(kwargs or {}).values())))
        self._note_write(tensors, is_certain=False)
        self.exact_values.drop(tensors)
        return self.run(func, (), args, kwargs)

    def _followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Any operator, where what is exact is noted."""
        wanted = exact_arguments(func)
        if wanted is not None and self._listener is not None and torch.is_grad_enabled():
            self._ask_for(wanted(args, kwargs), args[0] if written_arguments(func) else None)
        origin = self.exact_values.origin_of_results(func, args, kwargs)
        handler = _LOSSLESS[func]
        results = handler(self, func, args, kwargs) if handler is not None else self.run(func, (), args, kwargs)
        self.exact_values.note_results(func, results, origin)
        if func is aten.clone.default:
            self._last_clone = weakref.ref(results)
        return results

    def _ask_for(self, tensors: Iterable[Tensor], target: Any) -> None:
        assert self._listener is not None
        for tensor in tensors:
            clone = self._last_clone() if tensor is target and self._last_clone is not None else tensor
            if clone is not None and clone.shape == tensor.shape:  # in place: autograd has saved a copy
                self._listener.on_exact_argument(clone)


_Handler = Callable[[ValueNotes, Any, tuple[Any, ...], dict[str, Any] | None], Any]
_UNKNOWN: Any = object()
_LOSSLESS: dict[Any, _Handler | None] = {}  # None: nothing to note
_HANDLERS: dict[bool, dict[Any, _Handler | None]] = {False: _LOSSLESS, True: {}}
_DRAWING = frozenset([aten.bernoulli_.float, aten.bernoulli_.Tensor])
_IN_PLACE = [getattr(aten, name) for name in ("add_", "sub_", "mul_", "div_")]
_HANDLER_OF: dict[Any, _Handler] = {
    **dict.fromkeys(LARGEST_INDEX, ValueNotes._indexed),
    **dict.fromkeys([aten.bernoulli.default, aten.bernoulli.p], ValueNotes._mask),
    **dict.fromkeys(_DRAWING, ValueNotes._mask_in_place),
    **dict.fromkeys([aten.relu.default, aten.relu_.default, aten.leaky_relu_.default], ValueNotes._activation),
    **dict.fromkeys([overload for f in _IN_PLACE for overload in (f.Tensor, f.Scalar)], ValueNotes._mask_in_place),
}


def _choose_handler(func: Any, *, notes_exact: bool) -> _Handler | None:
    if not isinstance(func, OpOverload):
        return None  # a higher-order operator
    handler = _HANDLER_OF.get(func, ValueNotes._writing if written_arguments(func) else None)
    if func not in _HANDLER_OF and func.namespace not in ("aten", "prim", "prims", "profiler"):
        handler = ValueNotes._foreign
    _LOSSLESS[func] = handler
    is_followed = notes_exact and handler is not ValueNotes._foreign and not _is_view(func)
    return ValueNotes._followed if is_followed else handler


def _is_view(func: Any) -> bool:
    """Whether it returns a view: of the same memory, for which the same is noted."""
    returns = schema_of(func).returns
    return not written_arguments(func) and any(r.alias_info is not None for r in returns)
