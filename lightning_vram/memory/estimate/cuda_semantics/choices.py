"""Operators for which CUDA's dispatcher takes another way than that of a device without kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_vram.memory.estimate.cuda_semantics.attention.choice import Attention
from lightning_vram.memory.estimate.cuda_semantics.attention.kernels import run_attention
from lightning_vram.memory.estimate.cuda_semantics.norms import is_fused, rms_norm
from lightning_vram.memory.estimate.cuda_semantics.recurrent import NOTE, OPERATORS, run_recurrent
from lightning_vram.memory.estimate.cuda_semantics.spec import CudaSpec
from lightning_vram.private_names.cuda.dispatch_keys import BEHIND_AUTOCAST, Kernel, operator_named, pass_by
from lightning_vram.private_names.torch.operators import given_arguments, run_others
from lightning_vram.private_names.torch.trees import tensors_in

_Way = Callable[..., Any]
# Made of others, some of which autocast casts. Without autograd a dispatch mode would see them whole, where it is late.
_TAKEN_APART = ("aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::instance_norm")
# One kernel, which other devices make of several operators.
_ONE_KERNEL = ("aten::silu_backward", "aten::mish_backward")
# In place, and without a fake kernel. Those of Adam have one.
_FUSED_STEPS = ("aten::_fused_sgd_", "aten::_fused_sgd_.tensor_lr", "aten::_fused_adagrad_")


def choices(spec: CudaSpec, notes: dict[str, None]) -> dict[str, Kernel]:
    """Return the kernel of each operator, by its name."""
    kind = spec.stand_in.type
    ways: dict[str, _Way] = {
        "aten::scaled_dot_product_attention": partial(_attention, spec),
        "aten::rms_norm": _rms_norm,
        **dict.fromkeys(OPERATORS, partial(_recurrent, notes)),
        **dict.fromkeys(_FUSED_STEPS, _step_in_place),
        **dict.fromkeys(_TAKEN_APART, _take_apart),
        **dict.fromkeys(_ONE_KERNEL, _make_gradient),
    }
    return {name: partial(_run, kind, way, operator_named(name)) for name, way in ways.items()}


def _run(kind: str, way: _Way, op: Any, /, *args: Any, **kwargs: Any) -> Any:
    first = next(tensors_in(args), None)
    is_ours = first is not None and first.device.type == kind
    return way(op, given_arguments(op, args, kwargs)) if is_ours else _usual(op, args, kwargs)


def _usual(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with pass_by(BEHIND_AUTOCAST):
        return op(*args, **kwargs)


def _attention(spec: CudaSpec, op: Any, given: dict[str, Any]) -> Tensor:
    return run_attention(Attention(**given), spec)


def _rms_norm(op: Any, given: dict[str, Any]) -> Tensor:
    if not is_fused(given["input"], given.get("weight")):
        return _take_apart(op, given)  # type: ignore[no-any-return]
    return rms_norm(given["input"], given["normalized_shape"], given.get("weight"))


def _recurrent(notes: dict[str, None], op: Any, given: dict[str, Any]) -> tuple[Tensor, ...]:
    notes[NOTE] = None
    return run_recurrent(op.overloadpacket.__name__, given)


def _step_in_place(op: Any, given: dict[str, Any]) -> None: ...


def _make_gradient(op: Any, given: dict[str, Any]) -> Tensor:
    return torch.empty_like(given["grad_output"])


def _take_apart(op: Any, given: dict[str, Any]) -> Any:
    return run_others(op, **given)
