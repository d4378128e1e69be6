"""Operators of torch as objects, what they are declared to do, and those whose names are private."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from lightning_vram.private_names.torch.dispatch import DispatchKey

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket"]

UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
TO_COPY = torch.ops.aten._to_copy.default
READ_NUMBER = torch.ops.aten._local_scalar_dense.default
BATCH_NORM = torch.ops.aten._native_batch_norm_legit.default
BATCH_NORM_WITHOUT_STATISTICS = torch.ops.aten._native_batch_norm_legit.no_stats
"""One without running statistics."""

EMBEDDING_BAG = torch.ops.aten._embedding_bag.default
CTC_BACKWARDS = torch.ops.aten._ctc_loss_backward.default, torch.ops.aten._ctc_loss_backward.Tensor
INDEX_PUT = torch.ops.aten._index_put_impl_.default
MKLDNN_RNN = torch.ops.aten.mkldnn_rnn_layer.default
SPARSE_OF_PARTS = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
PACK_SEQUENCES = torch.ops.aten._pack_padded_sequence.default

neg_view: Callable[[Tensor], Tensor] = torch._neg_view
"""Return a view with the opposite sign."""

copy_each: Any = torch._foreach_copy_
"""Copy each tensor of the second list to that of the first."""

multiply_each: Any = torch._foreach_mul_
"""Multiply each tensor by a factor, in place."""

norm_each: Any = torch._foreach_norm
"""Return the 2-norm of each tensor."""

batch_norm_and_statistics: Callable[..., Any] | None = getattr(torch, "_batch_norm_impl_index", None)
"""What ``F.batch_norm`` is made of: chooses cuDNN as that does, and returns the statistics too. Not in all versions."""


def order_by_group(tensors: list[Tensor]) -> list[Tensor]:
    """Return ``tensors`` as ``get_total_norm`` orders them: those of one device and dtype together."""
    groups: Any = _group_tensors_by_device_and_dtype([tensors])  # type: ignore[list-item]
    return [tensor for (of_group,), _ in groups.values() for tensor in of_group]


schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return what an operator overload reads, writes and returns."""


def given_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an operator overload by their names; those left out are missing."""
    names = [argument.name for argument in schema_of(function).arguments]
    return dict(zip(names, args, strict=False)) | kwargs


is_mutable: Callable[[Any], bool] = attrgetter("_schema.is_mutable")
"""Whether an operator overload writes to an argument."""


def is_made_of_others(function: Any) -> bool:
    """Whether an operator overload has a kernel, in C++, that calls other operators."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), DispatchKey.CompositeImplicitAutograd)


def run_others(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run that kernel: the one that runs under autograd. ``decompose`` prefers Python's, which may round otherwise."""
    return function._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


overload_name: Callable[[Any], str] = attrgetter("_overloadname")
"""Return the name of the signature of an operator overload."""
all_operator_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
"""Return the names of all operators that are known now, with signatures."""


def is_on_lists(function: Any) -> bool:
    """Whether an operator does the same to many tensors at once, as fused optimizers do."""
    return bool(function.namespace == "aten" and function.__name__.startswith("_foreach"))
