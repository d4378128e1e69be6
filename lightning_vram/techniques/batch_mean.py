"""The mean of what was computed for the parts of a batch, weighted by the part of the whole each stands for.

It is computed from differences to the first value, so that equal values stay what they are, to the bit. Where one is
infinite, as a loss in half precision may be, the difference is not a number; there the plain sum is taken.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def average_tensors(values: Sequence[Tensor], shares: Sequence[float | Tensor]) -> Tensor:
    """Return the weighted mean of tensors of one shape and dtype, without a graph; the host does not wait.

    Args:
        values: Floating point or complex tensors.
        shares: Together 1; numbers, or tensors without dimensions.
    """
    first = values[0].detach()
    mean, total = first, torch.zeros_like(first)
    for value, share in zip(values, shares, strict=True):
        mean = mean + share * (value.detach() - first)
        total = total + share * value.detach()
    return torch.where(mean.isnan(), total, mean).to(first)


def average_numbers(values: Sequence[float], shares: Sequence[float | Tensor]) -> float:
    """As :func:`average_tensors`, for Python and NumPy numbers. The host waits for shares that are on a device."""
    first, weights = values[0], [float(share) for share in shares]
    mean = first + sum(weight * (value - first) for weight, value in zip(weights, values, strict=True))
    total = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return type(first)(total if math.isnan(mean) else mean)
