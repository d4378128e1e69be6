"""What an MLP takes in tiles, and what a language model takes when its sequences double, by the tracker."""

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_vram import ActivationCheckpointing, ActivationOffload, ChunkedLoss, TokenTiling, track_memory
from lightning_vram.demos import ByteGPT
from lightning_vram.techniques.token_tiling import apply_token_tiling

NUM_TOKENS, WIDTH = 32768, 32


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


def run(*, is_tiled: bool) -> tuple[int, list[Tensor]]:
    """Return the peak of an MLP forward and backward, its result and its gradients.

    Its input is there before and is not counted, and the gradient that comes in is one number. Its weights are, and its
    result, which the caller holds, and all gradients.
    """
    torch.manual_seed(0)
    net, hidden = nn.ModuleList([SwiGLU()]), torch.randn(1, NUM_TOKENS, WIDTH, requires_grad=True)
    if is_tiled:
        apply_token_tiling(net)
    with track_memory(net) as tracker:
        result = net[0](hidden)
        result.backward(torch.ones(()).expand_as(result))
    return tracker.timeline.peak_bytes, [result.detach(), hidden.grad, *(one.grad for one in net.parameters())]


def test_an_mlp_takes_a_seventh_at_32k_tokens():
    (plain, values), (tiled, same) = (run(is_tiled=is_tiled) for is_tiled in (False, True))
    assert tiled <= 0.15 * plain
    torch.testing.assert_close(same[0], values[0], rtol=1e-6, atol=1e-6)
    for one, other in zip(same, values, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


class Peak(pl.Callback):
    """Tracks a step."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *unused: object) -> None:
        self.tracking = track_memory(pl_module)
        self.tracker = self.tracking.__enter__()

    def on_train_batch_end(self, *unused: object) -> None:
        self.tracking.__exit__(None, None, None)
        self.peak_bytes = self.tracker.timeline.peak_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_twice_the_tokens_take_the_attention_of_one_layer(make_trainer):
    """As much for few layers as for many: from 12 layers on less than the residual stream.

    Query, key and value and their gradients, the result of the attention and its gradient, that of the residual stream,
    what the layer and what its projection got, and what the layer below gets, which comes early; and targets.
    """
    num_layers, width, num_tokens = 6, 16, 2048
    peaks = []
    for length in (num_tokens, 2 * num_tokens):
        peak = Peak()
        parts = [ActivationCheckpointing(), ActivationOffload("1KiB"), ChunkedLoss(), TokenTiling(tile=64)]
        trainer = make_trainer(callbacks=[*parts, peak], max_steps=1, limit_val_batches=0)
        model = ByteGPT(num_layers, width, 1, 2 * num_tokens, dropout=0.0)
        trainer.fit(model, DataLoader([torch.randint(256, (length + 1,))], batch_size=1))
        peaks.append(peak.peak_bytes)
    assert 12 <= (peaks[1] - peaks[0]) / (num_tokens * width * 4) <= 12.25
