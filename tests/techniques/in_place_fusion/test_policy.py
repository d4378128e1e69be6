"""What functions hide in attributes of their ``ctx`` is found and counted once."""

from typing import Any

import torch
from torch import Tensor

from lightning_vram.techniques.in_place_fusion.policy import count_hidden_bytes


class Hide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.hidden = [x * 2, {"again": x.detach()}]
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def test_tensors_in_attributes_are_counted_and_saved_ones_are_not() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    loss = Hide.apply(x * 1).sum() + Hide.apply(x).sin().sum()
    assert count_hidden_bytes({"loss": loss, "other": None}) == (1, 4 * 8 * 8 * 4)
    assert count_hidden_bytes([(x * 2).sum(), x, 3]) == (0, 0)
