"""What an MLP takes in tiles, and what a language model takes when its sequences double, by the tracker."""

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_vram import ActivationCheckpointing, ActivationOffload, ChunkedLoss, TokenTiling, track_memory
from lightning_vram.demos import ByteGPT
from lightning_vram.techniques.token_tiling import apply_token_tiling

WIDTH = 32


class SwiGLU(nn.Module):
    """The MLP of Llama, with its norm: [B, T, D] -> [B, T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        return self.down(F.silu(self.gate(normed)) * self.up(normed))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = SwiGLU()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(hidden)


def step(num_tokens: int, *, is_tiled: bool) -> tuple[int, Tensor, list[Tensor]]:
    """Return the peak of a step, its loss and its gradients."""
    torch.manual_seed(0)
    net, hidden = Residual(), torch.randn(1, num_tokens, WIDTH, requires_grad=True)
    if is_tiled:
        apply_token_tiling(net)
    with track_memory(net) as tracker:
        loss = net(hidden).square().mean()
        loss.backward()
    return tracker.timeline.peak_bytes, loss, [hidden.grad, *(one.grad for one in net.parameters())]


def test_an_mlp_takes_a_seventh_at_32k_tokens():
    (plain, loss, gradients), (tiled, same_loss, same_gradients) = (step(32768, is_tiled=one) for one in (False, True))
    print(plain/32768/128,tiled/32768/128)
    assert tiled <= 0.15 * plain
    torch.testing.assert_close(same_loss, loss, rtol=1e-6, atol=0)
    for one, other in zip(same_gradients, gradients, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
