"""``host_state``: moments in fewer bytes train as well as those in float32."""

from statistics import mean
from typing import Any

import lightning.pytorch as pl
import pytest
from support.offload_nets import leave_group
from torch import Tensor
from torch.optim import AdamW

from lightning_vram.demos import ByteGPT, SourceText
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]
NUM_STEPS, NUM_LAST = 200, 20
SEEDS = range(3)


class Losses(ByteGPT):
    """Keeps its losses."""

    def __init__(self) -> None:
        super().__init__(num_layers=2, width=32, sequence_length=32, dropout=0.0)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        loss = super().training_step(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), 3e-3)


@pytest.fixture
def last_loss(make_trainer: Any) -> Any:
    def last_loss(host_state: str) -> float:
        losses = []
        for seed in SEEDS:
            pl.seed_everything(seed, verbose=False)
            model, data = Losses(), SourceText(batch_size=8, sequence_length=32, num_train_bytes=200_000)
            strategy = FSDPOffloadStrategy(host_state=host_state)
            make_trainer(strategy=strategy, max_steps=NUM_STEPS, limit_val_batches=0).fit(model, data)
            leave_group()
            assert len(model.losses) == NUM_STEPS
            losses += model.losses[-NUM_LAST:]
        return mean(losses)

    return last_loss


def test_the_loss_is_that_of_float32(last_loss: Any) -> None:
    # A single seed's loss says little: float32 runs whose weights were perturbed by 0.1 % differ by as much as those of
    # bf16, up to 0.9 % either way. So the mean over seeds is held to the bounds, and to be better is no error.
    expected = last_loss("fp32")
    excess = {form: last_loss(form) / expected - 1 for form in ("bf16", "8bit")}
    print(excess)
    assert excess["bf16"] <= 0.005
    assert excess["8bit"] <= 0.02
