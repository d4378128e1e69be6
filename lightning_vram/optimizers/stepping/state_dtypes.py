"""The precision of optimizer state."""

from collections.abc import Container

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from lightning_vram.optimizers.stepping.step_round import State
from lightning_vram.optimizers.stepping.steppable import iterate_parameters


def floating(state: State) -> list[str]:
    """Name the floating tensors of a state; those without dimensions (step counts) keep their precision."""
    tensors = [key for key, value in state.items() if isinstance(value, Tensor) and value.dim()]
    return [key for key in tensors if state[key].is_floating_point()]


def full_sized(shape: torch.Size, state: State) -> list[str]:
    """Name the floating tensors with one number per weight."""
    return [key for key in floating(state) if state[key].shape == shape]


def convert_states(
    optimizer: Optimizer, parameters: Container[nn.Parameter], dtype: torch.dtype | None, full_dtype: torch.dtype | None
) -> None:
    """Change the dtype of floating state tensors, to ``full_dtype`` if elementwise; ``None``: as the parameter."""
    for parameter in iterate_parameters(optimizer):
        if parameter not in parameters or parameter not in optimizer.state:
            continue
        state: State = optimizer.state[parameter]
        full = full_sized(parameter.shape, state)
        for key in floating(state):
            state[key] = state[key].to((full_dtype if key in full else dtype) or parameter.dtype)


def refill_accumulators(optimizer: Optimizer, parameters: Container[nn.Parameter]) -> None:
    """Give Adagrad's states, created from bf16 weights, their exact initial value."""
    if not isinstance(optimizer, Adagrad):
        return
    initial = optimizer.defaults["initial_accumulator_value"]
    for parameter in iterate_parameters(optimizer):
        state = optimizer.state.get(parameter)
        if parameter in parameters and state and not state["step"]:
            state["sum"] = torch.full_like(state["sum"], initial, dtype=torch.float32)
