"""LSTM, GRU and plain recurrent layers as cuDNN runs them: all steps and layers at once, with one reserve to keep.

What the reserve holds is cuDNN's secret. Two sizes that https://github.com/pytorch/pytorch/issues/2895 tells (four
layers: 736,000,000 bytes for LSTM, 864,000,000 for GRU) are those of the gates, 5 and 6 vectors per step and layer, and
of the input of each layer but the first. Later versions may hold more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

NOTE = "nn.LSTM, nn.GRU or nn.RNN: what cuDNN keeps for the backward is an estimate."
_VECTORS_PER_STEP = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
OPERATORS = tuple(f"aten::{name}.{form}" for name in _VECTORS_PER_STEP for form in ("input", "data"))


@dataclass(frozen=True)
class _Layers:
    vectors: int
    num_hidden: int
    num_layers: int
    is_transposed: bool
    is_training: bool
    dtype: torch.dtype

    def reserve_bytes(self, num_steps: int, num_directions: int) -> int:
        """Bytes kept for the backward, for a number of time steps times samples."""
        if not self.is_training:
            return 0
        vectors = num_directions * (self.vectors * self.num_layers + self.num_layers - 1)
        return num_steps * vectors * self.num_hidden * self.dtype.itemsize


def run_recurrent(name: str, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Run layers as cuDNN does, as far as memory goes."""
    x: Tensor = given["input"] if "input" in given else given["data"]
    states = tuple(given["hx"]) if isinstance(given["hx"], Sequence) else (given["hx"],)
    layers = _Layers(
        vectors=_VECTORS_PER_STEP[name],
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
        num_steps = x.shape[:-1].numel()
        _time_first(layers, x)
        out = x.new_empty(shape)
        ends = tuple(torch.empty_like(state) for state in states)
        reserve = x.new_empty(layers.reserve_bytes(num_steps, num_directions), dtype=torch.uint8)
        ctx.layers, ctx.weights = layers, [(weight.shape, weight.dtype) for weight in weights]
        ctx.save_for_backward(x, *states, out, reserve, flat)
        return out, *ends

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *states, _, _, _ = ctx.saved_tensors
        copies = [_time_first(ctx.layers, tensor) for tensor in (x, gradients[0])]
        dx, *dstates = (torch.empty_like(tensor) for tensor in (x, *states))
        copies.clear()
        flat = x.new_zeros(sum(shape.numel() for shape, _ in ctx.weights))
        parts = flat.split([shape.numel() for shape, _ in ctx.weights])
        dweights = (part.view(shape).to(dtype) for part, (shape, dtype) in zip(parts, ctx.weights, strict=True))
        return None, None, *chain((dx, *dstates), dweights)


def _time_first(layers: _Layers, tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous() if layers.is_transposed else tensor.contiguous()
