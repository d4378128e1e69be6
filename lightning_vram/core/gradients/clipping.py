"""Clip gradients, some of them in 16 bit, by a norm that is computed in float32."""

from collections.abc import Iterable

import torch
from torch import Tensor

_NARROW = (torch.bfloat16, torch.float16)


def clip_gradient_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients so that their common 2-norm is ``max_norm`` at most, as ``torch.nn.utils.clip_grad_norm_`` does.

    That one computes norm and factor in the format of the gradients: with the 8 bits of bfloat16, up to half a percent
    beside.

    Args:
        parameters: With dense gradients, or none.
        max_norm: Largest norm.

    Returns:
        The norm before, a scalar of float32, or float64 where gradients are.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    device = gradients[0].device
    norms = [_norm(gradient).to(device) for gradient in gradients]
    dtype = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else torch.float32
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(dtype) for norm in norms]))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        if gradient.dtype in _NARROW:  # a 16-bit product would round the factor first
            gradient.copy_(gradient.float().mul_(factor.to(gradient.device)))
        else:
            gradient.mul_(factor.to(gradient.device))
    return norm


def _norm(gradient: Tensor) -> Tensor:
    dtype = torch.float32 if gradient.dtype in _NARROW else None
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=dtype)
    return norm
