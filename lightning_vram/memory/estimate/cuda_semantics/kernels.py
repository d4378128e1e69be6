"""Operators that CUDA's dispatcher runs otherwise than that of a device without kernels."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_vram.memory.estimate.cuda_semantics.attention import Attention, Capability, run_attention
from lightning_vram.memory.estimate.fakes.device_module import KIND
from lightning_vram.private_names.cuda.dispatch_keys import BEHIND_AUTOCAST, Kernel, operator_named, pass_by
from lightning_vram.private_names.torch.operators import given_arguments, run_others
from lightning_vram.private_names.torch.trees import tensors_in

_Way = Callable[[Any, dict[str, Any]], Any]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_RECURRENT_NOTE = "nn.LSTM, nn.GRU, nn.RNN: memory that cuDNN saves for backward is a rough estimate."
_VECTORS_PER_STEP = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
_RECURRENT = tuple(f"aten::{name}.{form}" for name in _VECTORS_PER_STEP for form in ("input", "data"))
# Made of others, some of which autocast casts. Without autograd a dispatch mode would see them whole, where it is late.
_TAKEN_APART = ("aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::instance_norm")
# One kernel, which other devices make of several operators.
_ONE_KERNEL = ("aten::silu_backward", "aten::mish_backward")
# In place, and without a fake kernel. Those of Adam have one.
_FUSED_STEPS = ("aten::_fused_sgd_", "aten::_fused_sgd_.tensor_lr", "aten::_fused_adagrad_")


def kernels_of(capability: Capability, notes: dict[str, None]) -> dict[str, Kernel]:
    """Return the kernel of each operator by its name; ``notes`` gets, as keys, what a reader of numbers should know."""
    ways: dict[str, _Way] = {
        "aten::scaled_dot_product_attention": lambda _, given: run_attention(Attention(**given), capability),
        "aten::rms_norm": _normalise,
        **dict.fromkeys(_RECURRENT, partial(_run_recurrent, notes)),
        **dict.fromkeys(_FUSED_STEPS, lambda op, given: None),
        **dict.fromkeys(_TAKEN_APART, _take_apart),
        **dict.fromkeys(_ONE_KERNEL, lambda _, given: torch.empty_like(given["grad_output"])),
    }
    return {name: partial(_run, way, operator_named(name)) for name, way in ways.items()}


def _run(way: _Way, op: Any, /, *args: Any, **kwargs: Any) -> Any:
    first = next(tensors_in(args), None)
    if first is not None and first.device.type == KIND:
        return way(op, given_arguments(op, args, kwargs))
    with pass_by(BEHIND_AUTOCAST):
        return op(*args, **kwargs)


def _take_apart(op: Any, given: dict[str, Any]) -> Any:
    return run_others(op, **given)


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory with its channels last, and in no other way."""
    layout = CHANNELS_LAST.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()


def _normalise(op: Any, given: dict[str, Any]) -> Tensor:
    x, weight = given["input"], given.get("weight")
    if is_channels_last(x) or (weight is not None and weight.dtype is not x.dtype):
        return _take_apart(op, given)  # type: ignore[no-any-return]
    return rms_norm(x, given["normalized_shape"], weight)


def rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None = None) -> Tensor:
    """Normalise as CUDA does, as far as memory goes."""
    return _RMSNorm.apply(x, len(normalized_shape), weight)  # type: ignore[no-any-return, no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, weight: Tensor | None) -> Tensor:
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        scales = x.new_empty((*x.shape[: x.dim() - dims], *(1,) * dims), dtype=dtype)
        ctx.save_for_backward(x, weight, scales)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        needs_x, _, needs_weight = ctx.needs_input_grad
        return (
            torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None,
            None,
            torch.empty_like(weight) if needs_weight else None,
        )


class _Layers(NamedTuple):
    vectors: int
    num_hidden: int
    num_layers: int
    is_transposed: bool
    is_training: bool
    dtype: torch.dtype

    def reserve_bytes(self, num_steps: int, num_directions: int) -> int:
        """Return the bytes saved for backward; ``num_steps`` counts time steps times samples."""
        if not self.is_training:
            return 0
        vectors = num_directions * (self.vectors * self.num_layers + self.num_layers - 1)
        return num_steps * vectors * self.num_hidden * self.dtype.itemsize

    def time_first(self, tensor: Tensor) -> Tensor:
        """Return a tensor as the kernel takes it."""
        return tensor.transpose(0, 1).contiguous() if self.is_transposed else tensor.contiguous()


def _run_recurrent(notes: dict[str, None], op: Any, given: dict[str, Any]) -> tuple[Tensor, ...]:
    notes[_RECURRENT_NOTE] = None
    x: Tensor = given["input"] if "input" in given else given["data"]
    states = tuple(given["hx"]) if isinstance(given["hx"], Sequence) else (given["hx"],)
    layers = _Layers(
        vectors=_VECTORS_PER_STEP[op.overloadpacket.__name__],
        num_hidden=states[-1].shape[-1],
        num_layers=given["num_layers"],
        is_transposed=given.get("batch_first", False),
        is_training=given["train"],
        dtype=torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype,
    )
    return _Recurrent.apply(layers, len(states), x, *states, *given["params"])  # type: ignore[no-any-return, no-untyped-call]


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: _Layers, num_states: int, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        states, weights = [state.to(layers.dtype) for state in rest[:num_states]], rest[num_states:]
        x = x.to(layers.dtype)
        is_cast = weights[0].dtype is not layers.dtype
        flat = x.new_empty(sum(weight.numel() for weight in weights)) if is_cast else None  # else they lie in one
        num_directions = states[0].shape[0] // layers.num_layers
        shape = (*x.shape[:-1], states[0].shape[-1] * num_directions)
        layers.time_first(x)
        out = x.new_empty(shape)
        ends = tuple(torch.empty_like(state) for state in states)
        reserve = x.new_empty(layers.reserve_bytes(x.shape[:-1].numel(), num_directions), dtype=torch.uint8)
        ctx.layers, ctx.weights = layers, [(weight.shape, weight.dtype) for weight in weights]
        ctx.save_for_backward(x, *states, out, reserve, flat)
        return out, *ends

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *states, _, _, _ = ctx.saved_tensors
        copies = [ctx.layers.time_first(tensor) for tensor in (x, gradients[0])]
        dx, *dstates = (torch.empty_like(tensor) for tensor in (x, *states))
        copies.clear()
        sizes = [shape.numel() for shape, _ in ctx.weights]
        parts = x.new_zeros(sum(sizes)).split(sizes)
        dweights = (part.view(shape).to(dtype) for part, (shape, dtype) in zip(parts, ctx.weights, strict=True))
        return None, None, dx, *dstates, *dweights
