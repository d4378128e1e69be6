"""``DTensor``: how it lies on its ranks, and a class that is asked before its local part is read."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_vram.private_names.torch.dispatch import without_dispatch
from lightning_vram.private_names.torch.tensors import local_part_of

__all__ = ["DTensorSpec", "TensorMeta"]


calls_derived_dispatch = torch.torch_version.TorchVersion("2.13") <= torch.__version__
"""Whether operators on a class derived from ``DTensor`` pass its ``__torch_dispatch__``: else only reads are seen."""


class AskedDTensor(DTensor):
    """A ``DTensor`` whose local part is given out by :meth:`give_local`; a tensor gets it as its class."""

    def give_local(self) -> Tensor:
        """Return the local part, once the tensor has its own class back: this one hides it."""
        raise NotImplementedError

    @property
    def _local_tensor(self) -> Tensor:  # type: ignore[override]
        return self.give_local()


_slot: Any = DTensor._local_tensor


own_part_of: Callable[[Any], Tensor] = _slot.__get__
"""Return the local shard of a ``DTensor``, also of one whose class is to be asked first."""
set_own_part: Callable[[Any, Tensor], None] = _slot.__set__
"""Let a tensor be the local shard of a ``DTensor``, whatever its class."""


def local_part(value: Any) -> Any:
    """Return this rank's part of a ``DTensor``, the very tensor, past autograd; anything else unchanged."""
    return local_part_of(value) if isinstance(value, DTensor) else value


_NUMBERS = {"__float__": float, "__index__": int, "__bool__": bool}


def _format(tensor: DTensor, spec: str) -> str:
    return format(tensor.item(), spec) if spec and not tensor.dim() else object.__format__(tensor, spec)


def read_numbers_by(read: Callable[[DTensor], Any] | None) -> None:
    """Let ``read`` return the number that a ``DTensor`` of one element is; ``None``: as PyTorch has it."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    operator = torch.ops.aten._local_scalar_dense.default
    handlers.pop(operator, None)
    for name in vars(DTensor).keys() & {*_NUMBERS, "__format__"}:
        delattr(DTensor, name)
    if read is not None:
        handlers[operator] = lambda _, args, kwargs: read(args[0])
        for name, kind in _NUMBERS.items():  # what torch.tensor([...]) calls past any dispatch
            setattr(DTensor, name, lambda tensor, kind=kind: kind(read(tensor)))
        setattr(DTensor, "__format__", _format)  # noqa: B010 - as those


def wrap_like(part: Tensor, like: DTensor) -> DTensor:
    """Return ``part`` as this rank's part of a tensor that lies as ``like`` does; nothing is sent or copied."""
    return DTensor(part, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def shard_like(whole: Tensor, like: DTensor) -> DTensor:
    """Return a whole tensor, of any shape and dtype, sharded as ``like`` is; nothing is sent."""
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(cut_own_part(whole, spec), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def place_of_own_part(like: DTensor | DTensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of a tensor that lies as ``like`` does, and where in it that begins."""
    with without_dispatch():  # torch computes with tensors, whose values an estimate would not have
        return compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)


def cut_own_part(whole: Tensor, like: DTensor | DTensorSpec) -> Tensor:
    """Return, as a view, this rank's part of a whole tensor that is to lie as ``like`` does."""
    lengths, offsets = place_of_own_part(like)
    part = whole.detach()
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        part = part.narrow(dimension, offset, length)
    return part
