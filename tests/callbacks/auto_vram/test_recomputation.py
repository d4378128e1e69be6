"""A plan that recomputes by itself: what changes between forward and backward is as it was in the forward."""

from contextvars import ContextVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_vram import AutoVRAM

SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)
WIDTH, TOKENS = 8, 2048


class MLP(nn.Module):
    mode = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.gain = torch.ones(32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x)) * SCALE.get() + self.gain
        return x + self.down(F.gelu(hidden) if self.mode == 0 else torch.tanh(hidden))


class TwoPasses(pl.LightningModule):
    """Runs its MLPs twice before the backward, and changes something in between."""

    def __init__(self, change: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change = change
        self.enter, self.mlps = nn.Linear(WIDTH, WIDTH), nn.ModuleList(MLP() for _ in range(3))

    def prepare(self, number: int) -> None:
        for mlp in self.mlps:
            if self.change == "a flag":
                mlp.mode = number
            elif self.change == "a view":
                mlp.gain = torch.linspace(0, number, 64)[:32]
        if self.change == "a context variable":
            SCALE.set(1.0 + number)

    def run(self, x: Tensor, number: int) -> Tensor:
        self.prepare(number)
        x = self.enter(x)
        for mlp in self.mlps:
            x = mlp(x)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.run(x, 0), y) + F.mse_loss(self.run(y, 1), x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        x, y = torch.randn(2, 3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, y), batch_size=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "budget", "technique"),
    [
        ("a flag", "1300KiB", "TokenTiling"),
        ("a context variable", "1300KiB", "TokenTiling"),
        ("a view", "1600KiB", "ActivationCheckpointing"),  # plans leave modules that hold such tensors without tiles
    ],
)
def test_a_plan_trains_as_the_run_without_it(change, budget, technique, make_trainer):
    auto, schemes, fitted = AutoVRAM(budget, allow="lossless"), [], []
    auto.on_train_start = lambda trainer, pl_module: schemes.append(str(auto.scheme))
    for callbacks in ([], [auto]):
        fitted.append(TwoPasses(change))
        make_trainer(callbacks=callbacks, max_steps=3, limit_val_batches=0).fit(fitted[-1])
    assert technique in schemes[0]
    for one, other in zip(fitted[1].parameters(), fitted[0].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
