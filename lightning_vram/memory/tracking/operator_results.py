"""What operators return: new memory, an argument that they changed, or a view of one."""

from enum import Enum, auto
from functools import cache
from typing import Any

import torch

from lightning_vram.private_names.torch.dispatch import DispatchKey
from lightning_vram.private_names.torch.operators import OpOverload, is_made_of_others, schema_of


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
