"""The mean over micro-batches, without blocking the host."""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float], sizes: Sequence[int]) -> Tensor:
    """Return the mean of ``values``; ``sizes`` weigh if all ``weights`` are 0. Equal values stay bitwise equal.

    It is computed from differences to the first value. If that is infinite, as a loss in half precision may be, the
    difference is NaN, so the plain sum is used. A value with weight 0 does not count, even if it is NaN: the mean over
    no tokens is 0 / 0. Infinite and NaN values show up in the result as they do in a sum.
    """
    counted = _counted(values, weights, sizes)
    first = mean = counted[0][0]
    plain = torch.zeros_like(first)
    for value, share in counted:
        mean = mean + (value - first) * share
        plain = plain + value * share
    # Where the first is finite both say the same, up to rounding.
    return torch.where(first.isfinite(), mean, plain).to(first.dtype)


def weighted_mean_of_numbers(values: Sequence[float], weights: Sequence[float], sizes: Sequence[int]) -> float:
    """As :func:`weighted_mean`, for Python and NumPy numbers; the result has the type of the first."""
    counted = _counted(values, weights, sizes)
    first = counted[0][0]
    if math.isfinite(first):
        mean = first + sum(share * (value - first) for value, share in counted)
    else:
        mean = sum(share * value for value, share in counted)
    return type(values[0])(mean)


def _counted(values: Sequence[Value], weights: Sequence[float], sizes: Sequence[int]) -> list[tuple[Value, float]]:
    total = sum(map(float, weights))
    if not total:
        weights, total = sizes, sum(sizes)
    return [(value, float(weight) / total) for value, weight in zip(values, weights, strict=True) if weight]
