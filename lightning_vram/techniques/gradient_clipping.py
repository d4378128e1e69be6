"""Clip gradients in 16 bit by a norm that is computed in float32."""

from collections.abc import Iterable

import torch
from torch import Tensor


def clip_gradient_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients so that their common 2-norm is ``max_norm`` at most, as ``torch.nn.utils.clip_grad_norm_`` does.

    That one computes norm and factor in the format of the gradients: with the 8 bits of bfloat16, up to half a percent
    beside.

    Args:
        parameters: With dense gradients, or none.
        max_norm: Largest norm.

    Returns:
        The norm before, a float32 scalar.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    device = gradients[0].device
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32).to(device) for gradient in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:  # a 16-bit product would round the factor first
        gradient.copy_(gradient.float().mul_(factor.to(gradient.device)))
    return norm
