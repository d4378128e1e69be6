"""What torch keeps of a tensor: its writes, whose view it is, its memory, its hooks, the parts of special layouts.

* ``torch.Tensor._version``: how often a tensor was written | 2.11 - | nothing works: no write is noticed
* ``torch.Tensor._base``: whose view a tensor is | 2.11 - | activations are neither compressed, recomputed nor offloaded
* ``torch.Tensor._is_view``: whether a tensor is a view | 2.11 - | as without ``_base``; checkpoints fail as well
* ``torch.Tensor._make_wrapper_subclass``: a tensor made of others | 2.11 - | no moments are kept in 8 bit
* ``torch.Tensor._backward_hooks``: whether somebody asked for its gradient | 2.11 - | invertible norms fail
* ``torch.Tensor._post_accumulate_grad_hooks``: whether a parameter is stepped in the backward | 2.11 - |
  micro-batches refuse to start
* ``torch.Tensor._indices``: indices of a sparse tensor, coalesced or not | 2.11 - | sparse tensors cannot be counted
* ``torch.Tensor._values``: values of a sparse tensor, coalesced or not | 2.11 - | sparse gradients cannot be scaled
* ``torch.nested._internal.nested_tensor.NestedTensor._ragged_idx``: which dimension of a jagged tensor has many
  lengths | 2.11 - | it is taken for the second
* ``torch.distributed.tensor.DTensor._local_tensor``: the part of a sharded tensor that this rank has | 2.11 - |
  sharded parameters cannot be clipped, stepped or released
* ``torch.UntypedStorage._cdata``: the identity of a memory, also of one without an address | 2.11 - | no memory is
  counted, noted or shared
* ``torch._C._storage_address``: the same in one call | 2.11 - | recomputation and checkpoints fail
* ``torch._C._storage_Use_Count``: how many tensors use a memory | 2.11 - | recomputation fails at the first write
* ``torch._C.DisableTorchFunctionSubclass``: ask a tensor of a subclass past its class | 2.11 - | losses are not chunked
* ``C._host_emptyCache``: give unused pinned memory back, in builds with an accelerator | 2.11 - | it stays with torch
"""

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
"""Names of what tells of views and writes."""
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


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the identity of ``storage``; another may have it after its death."""
    return storage._cdata  # type: ignore[no-any-return]


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether hooks wait for the gradient of ``tensor``."""
    return bool(tensor._backward_hooks)


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Whether hooks wait for the gradient to be accumulated in ``parameter``, but those with ``only_tells``."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    return not all(getattr(hook, "only_tells", False) for hook in hooks.values())


def sparse_indices(tensor: Tensor) -> Tensor:
    """Return the indices of a COO tensor as they are stored."""
    return tensor._indices()


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the values of a COO tensor as they are stored."""
    return tensor._values()


def ragged_dimension(tensor: Tensor) -> int:
    """Return the dimension of a jagged tensor that has many lengths."""
    dimension: int = getattr(tensor, "_ragged_idx", 1)
    return dimension


def local_part_of(shard: Any) -> Tensor:
    """Return the part of a ``DTensor`` that this rank has: the very tensor, past autograd."""
    part: Tensor = shard._local_tensor
    return part


def free_pinned_memory() -> None:
    """Give pinned memory back that torch keeps for later."""
    free = getattr(torch._C, "_host_emptyCache", None)
    if free is not None:
        free()


def gradient_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return those of ``Tensor.register_hook``."""
    return list((tensor._backward_hooks or {}).values())
