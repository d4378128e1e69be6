"""Note what is special about the results of few operators, as the operators pass by: what they hold is known.

Indices have a bound, masks have two values, and statistics and copies of weights are nothing to be careless with. A
note belongs to the memory of a tensor, is weak, and is believed only as long as nothing was written there: neither by
the version that autograd counts nor by an operator seen here, which sees also what counts no version (foreach and
fused operators, writes to ``.data``). NumPy and kernels that go past PyTorch are seen by neither: whoever reads a
note on the CPU, where NumPy can write, checks the values.

What it costs: a Python call and one look into a dictionary per operator.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_vram.techniques.cheap_operators import iterate_written, written_arguments
from lightning_vram.techniques.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.techniques.index_bounds import LARGEST_INDEX
from lightning_vram.techniques.saved_tensor_stage import PLAIN_TYPES
from lightning_vram.techniques.versions import storage_address, version_of

aten = torch.ops.aten


@dataclass(slots=True)
class _Note:
    storage: "weakref.ref[torch.UntypedStorage]"
    dtype: torch.dtype
    version: int
    largest: int | None  # index, or None: two values


class ValueNotes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is known about results while it is entered.

    Args:
        notes_exact: Whether to note, too, what must not be stored with an error.
    """

    supports_higher_order_operators = True

    def __init__(self, *, notes_exact: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handlers = _HANDLERS[notes_exact]
        self._notes_exact = notes_exact
        self._notes: dict[int, _Note] = {}  # by address of the storage
        self._exact: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._num_writes: dict[int, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled callables run compiled: else Dynamo silently runs them eagerly."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around every call: it is hidden below

    def clear(self) -> None:
        """Forget everything."""
        self._notes.clear()
        self._exact.clear()
        self._num_writes.clear()

    def largest_index(self, tensor: Tensor) -> int | None:
        """Return the largest value that the memory of ``tensor`` can hold, if it holds indices as they were made."""
        note = self._find(tensor)
        return note.largest if note is not None else None

    def may_be_two_valued(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` was made as a mask, and scaled at most."""
        note = self._find(tensor)
        return note is not None and note.largest is None

    def is_exact(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a second result of an operator, a statistic, or made of weights only."""
        storage = self._exact.get(storage_address(tensor))
        return storage is not None and storage() is not None

    def watch(self, tensor: Tensor) -> int:
        """Count the writes to the memory of ``tensor`` from now on, or go on; return how many there were."""
        return self._num_writes.setdefault(storage_address(tensor), 0)

    def num_writes(self, tensor: Tensor) -> int | None:
        """Return how many writes to the memory of ``tensor`` were seen since it is watched; ``None`` if it is not."""
        return self._num_writes.get(storage_address(tensor))

    @override
    @hide_from_dynamo
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self._handlers.get(func, _UNKNOWN)
        if handler is _UNKNOWN:
            handler = self._handlers[func] = _choose_handler(func, notes_exact=self._notes_exact)
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(self, func, args, kwargs)

    def _find(self, tensor: Tensor) -> _Note | None:
        note = self._notes.get(storage_address(tensor))
        if note is None or note.storage() is None:  # else its address cannot be another's
            return None
        return note if note.version == version_of(tensor) and note.dtype is tensor.dtype else None

    def _note(self, tensor: Tensor, version: int, largest: int | None) -> None:
        address = storage_address(tensor)
        if address and type(tensor) in PLAIN_TYPES:
            storage = weakref.ref(tensor.untyped_storage())
            self._notes[address] = _Note(storage, tensor.dtype, version, largest)

    def _note_exact(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                address = storage_address(tensor)
                if address:
                    self._exact[address] = weakref.ref(tensor.untyped_storage())

    def _note_write(self, targets: Iterable[Tensor]) -> None:
        for target in targets:
            address = storage_address(target)
            self._notes.pop(address, None)
            if address in self._num_writes:
                self._num_writes[address] += 1

    # Handlers. Each runs the operator and returns what it returns.

    def _indices(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        results = func(*args, **kwargs) if kwargs else func(*args)
        indices = results if isinstance(results, Tensor) else results[-1]
        self._note(indices, version_of(indices), LARGEST_INDEX[func](args, kwargs))
        return results

    def _mask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        self._note(result, version_of(result), None)
        return result

    def _mask_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        target = args[0]
        self._note_write((target,))
        result = func(*args, **kwargs) if kwargs else func(*args)
        if target.nbytes == target.untyped_storage().nbytes():
            self._note(target, version_of(target) + 1, None)  # autograd counts the write after this returns
        return result

    def _scaling(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        target, scale = args[0], args[1]
        is_mask = self.may_be_two_valued(target) and (not isinstance(scale, Tensor) or scale.dim() == 0)
        is_mask = is_mask and target.nbytes == target.untyped_storage().nbytes()
        self._note_write((target,))
        result = func(*args, **kwargs) if kwargs else func(*args)
        if is_mask:
            self._note(target, version_of(target) + 1, None)
        return result

    def _writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        targets = list(iterate_written(func, args, kwargs))
        self._note_write(targets)
        results = func(*args, **kwargs) if kwargs else func(*args)
        if func.namespace == "aten" and func.__name__.startswith("_foreach"):
            # On the host a dispatch mode keeps these from counting their writes, by which autograd knows of them.
            increment_version([target for target in targets if not target.is_inference()])
        if self._notes_exact and _has_statistics(func):
            self._note_exact(results[1:])
        return results

    def _foreign(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Operators of extensions, which may write without saying so."""
        self._note_write(_iterate_tensors((*args, *(kwargs or {}).values())))
        return func(*args, **kwargs) if kwargs else func(*args)

    def _statistics(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        results = func(*args, **kwargs) if kwargs else func(*args)
        self._note_exact((results,) if isinstance(results, Tensor) else results[1:])
        return results

    def _of_weights(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if all(type(tensor) is nn.Parameter or self.is_exact(tensor) for tensor in _iterate_tensors(args)):
            self._note_exact((result,))
        return result


def _iterate_tensors(args: Iterable[Any]) -> Iterable[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _iterate_tensors(arg)


_Handler = Callable[[ValueNotes, Any, tuple[Any, ...], dict[str, Any] | None], Any]
_UNKNOWN: Any = object()
_HANDLERS: dict[bool, dict[Any, _Handler | None]] = {False: {}, True: {}}  # None: nothing to note
_IN_PLACE = [getattr(aten, name) for name in ("add_", "sub_", "mul_", "div_")]
_HANDLER_OF: dict[Any, _Handler] = {
    **dict.fromkeys(LARGEST_INDEX, ValueNotes._indices),
    **dict.fromkeys([aten.bernoulli.default, aten.bernoulli.p], ValueNotes._mask),
    **dict.fromkeys([aten.bernoulli_.float, aten.bernoulli_.Tensor], ValueNotes._mask_in_place),
    **dict.fromkeys(
        [getattr(f, overload) for f in _IN_PLACE for overload in ("Tensor", "Scalar")], ValueNotes._scaling
    ),
}
# What is divided by, or what a small relative error changes much.
_EXACT = "mean sum prod var std amax amin max min logsumexp linalg_vector_norm norm rsqrt sqrt reciprocal"
_OF_WEIGHTS = "_to_copy clone mul div add sub neg mm cat stack"


def _choose_handler(func: Any, *, notes_exact: bool) -> _Handler | None:
    if not isinstance(func, torch._ops.OpOverload):
        return None  # a higher-order operator
    if func in _HANDLER_OF:
        return _HANDLER_OF[func]
    if func.namespace not in ("aten", "prim", "prims", "profiler"):
        return ValueNotes._foreign
    if written_arguments(func):
        return ValueNotes._writing
    name = func._schema.name.partition("::")[2]
    if notes_exact and (_has_statistics(func) or name in _EXACT.split()):
        return ValueNotes._statistics
    return ValueNotes._of_weights if notes_exact and name in _OF_WEIGHTS.split() else None


def _has_statistics(func: Any) -> bool:
    """Whether ``func`` gives several tensors that are no views: what comes after the first is for its backward."""
    returns = func._schema.returns
    return len(returns) > 1 and all(str(r.type) == "Tensor" and r.alias_info is None for r in returns[:2])
