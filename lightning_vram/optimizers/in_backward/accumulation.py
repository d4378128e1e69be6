"""Adam accumulation (Zhang et al., arXiv 2305.19982): moments accumulate the gradients of micro-batches."""

from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_vram.optimizers.stepping.step_round import State
from lightning_vram.optimizers.stepping.steppable import steps_like


def refuse_accumulation(name: str, optimizer: Optimizer, *, is_stepped_here: bool) -> None:
    """Refuse an optimizer whose moments cannot accumulate gradients; ``is_stepped_here``: nothing else steps it."""
    kind, way_out = type(optimizer).__name__, "or keep_gradients=True."
    if not steps_like(type(optimizer), [Adam, AdamW]):
        raise ValueError(f"{name} is for Adam and AdamW of torch.optim, got {kind}: use one of these, {way_out}")
    if not is_stepped_here:
        raise ValueError(
            f"{name} does not work with low-precision moments, which would be rounded in each micro-batch: leave "
            f"MomentsInBF16 or LowBitOptimizer out, {way_out}"
        )
    betas = [tuple(map(float, group["betas"])) for group in optimizer.param_groups]
    if not all(map(all, betas)):
        raise ValueError(f"{name} needs betas above 0, got {min(betas)} in {kind}: use others, {way_out}")


@torch.no_grad()
def take_in(parameter: nn.Parameter, state: State, group: dict[str, Any]) -> None:
    """Add the gradient of a parameter to its moments, scaled for the betas of the step that follows, and free it.

    The second moment sums squares of micro-batch gradients, where Adam squares their sum: equal for independent
    gradients, up to the number of micro-batches smaller if they agree.
    """
    gradient = parameter.grad
    assert gradient is not None
    if not state:
        _begin(parameter, state, group)
    first, second = ((1 - float(beta)) / float(beta) for beta in group["betas"])
    state["exp_avg"].add_(gradient, alpha=-first if group["maximize"] else first)
    state["exp_avg_sq"].addcmul_(gradient, gradient, value=second)
    parameter.grad = None


def _begin(parameter: nn.Parameter, state: State, group: dict[str, Any]) -> None:
    """Create the state as Adam does."""
    is_on_device = group["capturable"] or group["fused"]
    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if is_on_device else "cpu")
    for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
        state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
