"""What operators return: new memory, an argument that they changed, or a view of one; and a mode that reports it."""

from collections.abc import Callable
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from typing_extensions import override

from lightning_vram.private_names.torch.dispatch import (
    ASK_DEVICE,
    DispatchKey,
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)
from lightning_vram.private_names.torch.operator_calls import call_operator
from lightning_vram.private_names.torch.operators import OpOverload, is_made_of_others, run_others, schema_of


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
    if func.namespace == "prim":
        return Results.VIEWS  # questions about a tensor; the dispatcher does not know them
    keys = DispatchKey
    has_own_kernel = func.has_kernel_for_dispatch_key(keys.CPU) or func.has_kernel_for_dispatch_key(keys.CUDA)
    if is_made_of_others(func) and not has_own_kernel:
        return Results.COMPOSED
    schema = schema_of(func)
    if not any(result.alias_info for result in schema.returns):
        return Results.NEW
    if func is torch.ops.aten.lift_fresh.default:  # the first that is seen of torch.tensor([...])
        return Results.NEW
    return Results.CHANGED if schema.is_mutable else Results.VIEWS


class ResultRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``before(operator)``, runs the operator, and calls ``note(result, what it is, operator)``."""

    supports_higher_order_operators = True

    def __init__(
        self, note: Callable[[Any, Results, Any], None], before: Callable[[Any], None] = lambda func: None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note
        self._before = before

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the wrapper unwraps itself; what it runs inside comes here again
        if func is ASK_DEVICE:
            return args[0].device
        results = results_of(func)
        if results is Results.COMPOSED:
            with self:
                return run_others(func, *args, **(kwargs or {}))
        self._before(func)
        result = call_operator(func, args, kwargs)
        self._note(result, results, func)
        return result
