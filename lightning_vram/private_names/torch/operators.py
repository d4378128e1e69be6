"""Operators of torch as objects, what they are declared to do, and those whose names are private.

* ``torch._ops.OpOverload``: an operator with one signature | 2.11 - | nothing works
* ``torch._ops.OpOverloadPacket``: an operator with all signatures | 2.11 - | save policies fail
* ``torch._ops.HigherOrderOperator``: an operator that takes functions | 2.11 - | save policies fail
* ``torch._ops.OpOverload._schema``: what it reads, writes and returns | 2.11 - | nothing works
* ``torch._ops.OpOverload._overloadname``: which signature | 2.11 - | recomputation and compression fail
* ``torch._ops.OpOverload._op_dk``: runs one of its kernels | 2.11 - | tracking fails without gradients
* ``torch._C._dispatch_has_kernel_for_dispatch_key``: whether it has one in C++ | 2.11 - | tracking fails
* ``torch._C._dispatch_get_all_op_names``: names of all operators | 2.11 - | a misspelled operator raises another error
* ``torch._foreach_copy_``: copy many tensors at once | 2.11 - | nothing works
* ``torch._foreach_mul_``: multiply many tensors at once | 2.11 - | loss scaling and clipping of shards fail
* ``torch._foreach_norm``: norms of many tensors at once | 2.11 - | clipping by norm in the backward fails under FSDP2
* ``torch.utils._foreach_utils._group_tensors_by_device_and_dtype``: in which order norms are added up | 2.11 - |
  clipping of gradients that are kept in 16 bit fails
* ``torch._neg_view``: a view with the opposite sign | 2.11 - | the few tensors with that bit are not offloaded
* ``torch._batch_norm_impl_index``: what ``F.batch_norm`` is made of | 2.11 - | ``native_batch_norm`` runs, never cuDNN
* ``torch.ops.aten._unsafe_view``: a view that counts versions on its own | 2.11 - | results of operators are not kept
* ``torch.ops.aten._to_copy``: what all casts become | 2.11 - | recomputation and checks of it fail
* ``torch.ops.aten._native_batch_norm_legit``: a batch norm that says what it writes | 2.11 - | recomputation fails
* ``torch.ops.aten._local_scalar_dense``: what ``.item()`` is | 2.11 - | no step is estimated
* ``torch.ops.aten._embedding_bag``: what an embedding bag runs | 2.11 - | its estimate on the host is 8 bytes too small
* ``torch.ops.aten._ctc_loss_backward``: gradient of a CTC loss | 2.11 - | no step with one is estimated
* ``torch.ops.aten._index_put_impl_``: gradient of indexing | 2.11 - | estimates lack what it sorts indices with
* ``torch.ops.aten.mkldnn_rnn_layer``: an LSTM of oneDNN | 2.11 - | its estimate on the host lacks the workspace
* ``torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors``: makes a sparse tensor of indices and values | 2.11 - |
  steps with sparse gradients are not estimated
* ``torch.ops.aten._pack_padded_sequence``: what ``pack_padded_sequence`` is | 2.11 - | steps with it are not estimated
* ``aten._foreach``: what the names of operators on many tensors begin with | 2.11 - |
  writes of fused optimizers are not noticed on the host
"""

from collections.abc import Callable
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


def schema_of(function: Any) -> Any:
    """Return what an operator overload reads, writes and returns."""
    return function._schema


def given_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an operator overload by their names; those left out are missing."""
    names = [argument.name for argument in schema_of(function).arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def is_mutable(function: Any) -> bool:
    """Whether an operator overload writes to an argument."""
    return bool(schema_of(function).is_mutable)


def is_made_of_others(function: Any) -> bool:
    """Whether an operator overload has a kernel, in C++, that calls other operators."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), DispatchKey.CompositeImplicitAutograd)


def run_others(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run that kernel: the one that runs under autograd. ``decompose`` prefers Python's, which may round otherwise."""
    return function._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def overload_name(function: Any) -> str:
    """Return the name of the signature of an operator overload."""
    name: str = function._overloadname
    return name


def all_operator_names() -> list[str]:
    """Return the names of all operators that are known now, with signatures."""
    return torch._C._dispatch_get_all_op_names()


def is_on_lists(function: Any) -> bool:
    """Whether an operator does the same to many tensors at once, as fused optimizers do."""
    return bool(function.namespace == "aten" and function.__name__.startswith("_foreach"))
