"""One dispatch mode for all that observe operators: the tracker, the recorder of recipes, notes of values, profilers.

A mode costs each operator several microseconds before it does anything, so features that observe at the same time
share one. An :class:`OperatorSubscriber` gets each operator below autograd, innermost first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import cache
from threading import get_ident
from typing import Any, Self

import torch
from typing_extensions import override

from lightning_vram.memory.storages import ByStorage, iterate_storages
from lightning_vram.private_names import dispatcher
from lightning_vram.private_names.dispatcher import OpOverload, UnwrappedMode, hide_from_dynamo
from lightning_vram.private_names.torch import tensors_in

RunOperator = Callable[[Any, Any, tuple[Any, ...], dict[str, Any] | None], Any]


class Results(Enum):
    """What an operator returns."""

    NEW = auto()
    CHANGED = auto()  # an argument, perhaps with another size: ``aten.resize_``
    VIEWS = auto()  # of an argument: an unknown storage is older than the block
    COMPOSED = auto()  # what other operators return: without autograd those are not seen unless it is taken apart


@cache
def results_of(func: Any) -> Results:
    """Return what ``func``, an overload or a higher-order operator, returns."""
    if not isinstance(func, OpOverload):
        return Results.NEW  # a higher-order operator
    keys = dispatcher.DispatchKey
    try:
        has_own_kernel = func.has_kernel_for_dispatch_key(keys.CPU) or func.has_kernel_for_dispatch_key(keys.CUDA)
    except RuntimeError:  # a question about a tensor, such as aten.sym_size: the dispatcher does not know it
        return Results.VIEWS
    if dispatcher.is_composite_operator(func) and not has_own_kernel:
        return Results.COMPOSED
    schema = dispatcher.schema_of(func)
    # of ``lift_fresh``: the first that is seen of torch.tensor([...])
    if func is torch.ops.aten.lift_fresh.default or not any(result.alias_info for result in schema.returns):
        return Results.NEW
    return Results.CHANGED if schema.is_mutable else Results.VIEWS


class OperatorSubscriber:
    """Observes operators while it is entered. Override :meth:`before` and :meth:`after`, or :meth:`on_operator`.

    Subscribers of a thread share a dispatch mode unless another one was entered between them. What a subscriber
    computes while it handles an operator is seen by none that shares its mode.
    """

    takes_apart = False
    """Whether to see what wrapper subclasses (DTensor) and composite operators consist of, and run compiled code
    uncompiled: the tracker must see each allocation."""

    run: RunOperator  # runs an operator: the next subscriber outside of this one, or PyTorch
    _is_paused = False
    _listener: "_OperatorListener"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "on_operator" in vars(cls):
            cls.on_operator = hide_from_dynamo(cls.on_operator)  # type: ignore[method-assign]

    def __enter__(self) -> Self:
        if hasattr(self, "_listener"):
            raise RuntimeError(f"this {type(self).__name__} observes operators already.")
        mode = dispatcher.current_dispatch_mode()
        if not (isinstance(mode, _OperatorListener) and mode.kind == (self.takes_apart, get_ident())):
            mode = _OperatorListener(takes_apart=self.takes_apart)
            mode.__enter__()  # type: ignore[no-untyped-call]
        self._listener = mode
        mode.change([*mode.subscribers, self])
        return self

    def __exit__(self, *error: object) -> None:
        mode = self._listener
        mode.change([other for other in mode.subscribers if other is not self])
        del self._listener, self.run  # so that nothing here holds those outside
        if not mode.subscribers:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @property
    def is_innermost(self) -> bool:
        """Whether it gets operators of this thread first."""
        mode = dispatcher.current_dispatch_mode()
        return isinstance(mode, _OperatorListener) and mode.subscribers[-1] is self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let operators inside the block pass: they are our own. Other subscribers see them."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @hide_from_dynamo
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an operator by :attr:`run` and return its result. ``types``: tensor subclasses among the arguments."""
        if self._is_paused:
            return self.run(func, types, args, kwargs)
        self.before(func, args, kwargs)
        result = self.run(func, types, args, kwargs)
        self.after(func, args, kwargs, result)
        return result

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Called before an operator runs."""

    def after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """Called after an operator ran."""


class StorageSubscriber(OperatorSubscriber):
    """Is told of each storage that an operator makes and that a map of known storages does not have yet."""

    def __init__(self, known: ByStorage[Any]) -> None:
        self.known = known

    def on_storage(self, func: Any, storage: torch.UntypedStorage, device: torch.device) -> None:
        """Called with a new storage. ``device`` is its tensor's: a fake tensor's storage is on ``meta``."""
        raise NotImplementedError

    def on_change(self, result: Any) -> None:
        """Called with arguments that an operator returned and perhaps resized."""

    @override
    def after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        results = results_of(func)
        if results is Results.CHANGED:
            self.on_change(result)
        elif results is Results.NEW:
            for tensor in tensors_in(result):
                for storage, device in iterate_storages(tensor):
                    if self.known.find_storage(storage) is None:
                        self.on_storage(func, storage, device)


class _OperatorListener(UnwrappedMode):
    supports_higher_order_operators = True

    def __init__(self, *, takes_apart: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.takes_apart = takes_apart
        self.kind = takes_apart, get_ident()  # autograd's threads get the caller's modes, and run side by side
        self.subscribers: list[OperatorSubscriber] = []  # innermost last
        self._first: RunOperator = dispatcher.run_operator

    @override
    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Let compiled callables run compiled, unless a subscriber takes all apart: else they silently run eagerly."""
        return not self.takes_apart

    def change(self, subscribers: list[OperatorSubscriber]) -> None:
        """Let these get operators, the last one first."""
        self.subscribers, self._first = subscribers, dispatcher.run_operator
        for subscriber in subscribers:
            subscriber.run, self._first = self._first, subscriber.on_operator

    @override
    @hide_from_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.takes_apart:
            if any(map(dispatcher.is_traceable_wrapper_subclass_type, types)):
                return NotImplemented  # the wrapper unwraps itself; what it runs inside comes here again
            if func is dispatcher.ASK_DEVICE:
                return args[0].device
            if results_of(func) is Results.COMPOSED:
                with self:
                    return dispatcher.run_composite_kernel(func, *args, **(kwargs or {}))
        return self._first(func, types, args, kwargs)


def current_subscribers() -> list[OperatorSubscriber]:
    """Return those that get operators of this thread, innermost last."""
    listeners = (mode for mode in dispatcher.current_dispatch_modes() if isinstance(mode, _OperatorListener))
    return [subscriber for listener in listeners for subscriber in listener.subscribers]
