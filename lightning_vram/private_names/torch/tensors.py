"""What torch stores in a tensor: writes, base, storage, hooks, data of special layouts."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

storage_identity: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
"""Return the identity of the memory of a tensor."""

count_storage_users: Callable[[int], int] = torch._C._storage_Use_Count
"""Return how many users the memory of this identity has."""
num_writes: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor was written. Views share the number."""

is_view: Callable[[Tensor], bool] = torch.Tensor._is_view
"""Whether a tensor is a view, to autograd."""

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""Return the tensor that another is a view of, to autograd."""

VIEW_PROPERTIES = frozenset({"_base", "_version"})
"""Attributes that identify views and writes."""
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""Make a context in which functions do not ask tensors' classes how they are done."""


def make_wrapper(kind: type[Tensor], shape: Sequence[int], **options: Any) -> Any:
    """Return a tensor of a class that keeps its values in other tensors; ``options``: dtype, device, strides."""
    return torch.Tensor._make_wrapper_subclass(kind, tuple(shape), **options)


def ends_of_graph(tensor: Tensor) -> list[Any]:
    """Return the nodes that ``tensor`` keeps: its own, and that of its base, if it was made where no graph is made."""
    try:
        found = [one.grad_fn for one in (tensor, tensor._base) if one is not None]
    except RuntimeError:  # a view that was written to where no graph may be made
        found = [] if tensor._base is None else [tensor._base.grad_fn]
    return [node for node in found if node is not None]


storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Return the identity of a storage; another may have it after its death."""


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether hooks wait for the gradient of ``tensor``."""
    return bool(tensor._backward_hooks)


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Whether hooks wait for the gradient to be accumulated in ``parameter``, but those with ``only_tells``."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    return not all(getattr(hook, "only_tells", False) for hook in hooks.values())


sparse_indices: Callable[[Tensor], Tensor] = torch.Tensor._indices
"""Return the indices of a COO tensor as they are stored."""
sparse_values: Callable[[Tensor], Tensor] = torch.Tensor._values
"""Return the values of a COO tensor as they are stored."""


def ragged_dimension(tensor: Tensor) -> int:
    """Return the dimension of a jagged tensor that has many lengths."""
    dimension: int = getattr(tensor, "_ragged_idx", 1)
    return dimension


local_part_of: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""Return the local shard of a ``DTensor``: the very tensor, past autograd."""


def free_pinned_memory() -> None:
    """Give pinned memory back that torch keeps for later."""
    free = getattr(torch._C, "_host_emptyCache", None)
    if free is not None:
        free()


def gradient_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return those of ``Tensor.register_hook``."""
    return list((tensor._backward_hooks or {}).values())
