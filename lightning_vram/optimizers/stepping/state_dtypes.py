"""The precision of what an optimizer keeps for each parameter."""

from collections.abc import Container

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from lightning_vram.optimizers.stepping.step_round import State
from lightning_vram.optimizers.stepping.steppable import iterate_parameters


def floating(state: State) -> list[str]:
    """Name the floating tensors in a state that have the precision of weights.

    Those without dimensions have not: they count steps and the like, and keep the precision that they have.
    """
    tensors = [key for key, value in state.items() if isinstance(value, Tensor) and value.dim()]
    return [key for key in tensors if state[key].is_floating_point()]


def full_sized(shape: torch.Size, state: State) -> list[str]:
    """Name those that hold one number for each weight of a parameter of this shape."""
    return [key for key in floating(state) if state[key].shape == shape]


def convert_states(
    optimizer: Optimizer, parameters: Container[nn.Parameter], dtype: torch.dtype | None, full_dtype: torch.dtype | None
) -> None:
    """Change the dtype of the states that an optimizer has of some parameters.

    Args:
        optimizer: Whose states they are.
        parameters: Those whose states change.
        dtype: Of floating tensors with dimensions; ``None``: that of the parameter.
        full_dtype: Of those that hold a number for each weight; ``None``: that of the parameter.
    """
    for parameter in iterate_parameters(optimizer):
        if parameter not in parameters or parameter not in optimizer.state:
            continue
        state: State = optimizer.state[parameter]
        full = full_sized(parameter.shape, state)
        for key in floating(state):
            state[key] = state[key].to((full_dtype if key in full else dtype) or parameter.dtype)


def refill_accumulators(optimizer: Optimizer, parameters: Container[nn.Parameter]) -> None:
    """Give the states that Adagrad made out of bf16 weights, before any step, their exact initial value."""
    if not isinstance(optimizer, Adagrad):
        return
    initial = optimizer.defaults["initial_accumulator_value"]
    for parameter in iterate_parameters(optimizer):
        state = optimizer.state.get(parameter)
        if parameter in parameters and state and not state["step"]:
            state["sum"] = torch.full_like(state["sum"], initial, dtype=torch.float32)
