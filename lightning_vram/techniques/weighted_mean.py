"""The mean over micro-batches: equal values stay equal to the bit, and nobody waits for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float | Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the mean of ``values``, each ``weights[i] / sum(weights)`` of it.

    Args:
        values: Floating tensors of one shape; at least one.
        weights: A number or a 0-dim tensor for each; not negative.
        sizes: Weights for the case that all others are 0.

    Returns:
        A tensor of that shape. Infinite and NaN values show up in it as they do in a sum.
    """
    first = values[0]
    shares = _normalize(weights, sizes)
    mean, plain = first, first * shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        mean = mean + (value - first) * share
        plain = plain + value * share
    # The difference of two infinities is none; where the first is finite both say the same, up to rounding.
    return torch.where(first.isfinite(), mean, plain)


def _normalize(weights: Sequence[float | Tensor], sizes: Sequence[int]) -> list[float | Tensor]:
    total, total_size = sum(weights), sum(sizes)
    if isinstance(total, Tensor):
        pairs = zip(weights, sizes, strict=True)
        return [torch.where(total == 0, size / total_size, weight / total) for weight, size in pairs]
    if not total:
        return [size / total_size for size in sizes]
    return [weight / total for weight in weights]
