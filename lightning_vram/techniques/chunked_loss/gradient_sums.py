"""Gradients that are added up from those of chunks."""

from collections.abc import Sequence

import torch
from torch import Tensor

_LOW = (torch.float16, torch.bfloat16)


class GradientSum:
    """The gradient of one input; what is added up, is so in float32 where the input is in 16 bit."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None

    def put(self, part: Tensor, start: int) -> None:
        """Take the gradient of some rows."""
        if self._sum is None:
            self._sum = torch.zeros_like(self._like)
        self._sum[start : start + len(part)] = part

    def add(self, part: Tensor) -> None:
        """Add what some rows have of it."""
        if self._sum is None:
            self._sum = torch.zeros_like(self._like, dtype=wide_dtype(self._like.dtype))
        self._sum += part

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add a product of matrices."""
        if self._sum is None:
            self._sum = (left @ right).to(wide_dtype(self._like.dtype))
        elif self._sum.dtype == left.dtype:
            self._sum.addmm_(left, right)
        else:
            self._sum += left @ right

    def result(self, shape: Sequence[int]) -> Tensor:
        """Return all of it."""
        whole = torch.zeros_like(self._like) if self._sum is None else self._sum.to(self._like.dtype)
        return whole.view(shape)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what numbers of a dtype are added up in."""
    return torch.float32 if dtype in _LOW else dtype
