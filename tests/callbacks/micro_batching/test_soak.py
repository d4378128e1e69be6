"""Many steps and any sizes: nothing grows, nothing drifts."""

import random
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.helpers import assert_equal_weights
from support.memory_limit import MemoryLimit
from support.micro_batching_models import Script
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_vram import MicroBatching

NUM_STEPS = 500


class LitSmall(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3)
        self.net = nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 1)).double()
        self.is_in_step = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.is_in_step = True
        rows = batch.flatten(0, 1)  # three of each sample, or a norm refuses one
        loss = (self.net(rows) - rows.sum(-1, keepdim=True)).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.is_in_step = False
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(FreshBatches(), batch_size=None)


class FreshBatches(Dataset):
    """Made when they are asked for, so that none stays alive."""

    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


class Trouble(pl.Callback):
    """In one batch of ten memory runs out, somewhere between its first operator and its last."""

    def __init__(self, limit: MemoryLimit) -> None:
        self.random = random.Random(0)
        self.model: LitSmall | None = None
        self.countdown = -1
        self.sizes: list[int | None] = []
        self.live_bytes: list[int] = []
        limit.veto = self.strikes
        self.limit = limit

    def strikes(self) -> bool:
        if self.model is None or not (self.model.is_in_step or torch._C._current_graph_task_id() != -1):
            return False
        self.countdown -= 1
        return self.countdown == 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: LitSmall, *args: Any) -> None:
        self.model = module
        self.countdown = self.random.randrange(1, 35) if self.random.random() < 0.1 else -1

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.countdown = -1

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.countdown = -1
        (callback,) = (one for one in trainer.callbacks if isinstance(one, MicroBatching))
        self.sizes.append(callback.micro_batch_size)
        self.live_bytes.append(self.limit.live_bytes)


@pytest.mark.slow
def test_many_steps_with_errors_in_one_of_ten_neither_leak_nor_drift(fit) -> None:
    with MemoryLimit() as limit:
        trouble = Trouble(limit)
        troubled = fit(LitSmall, MicroBatching(regrow_after_n_batches=3), trouble)
    assert limit.num_errors > 30
    assert 0 < limit.errors_in_backward < limit.num_errors
    assert {2, 4, 8} <= set(trouble.sizes)
    assert max(trouble.live_bytes[-100:]) <= max(trouble.live_bytes[50:150])
    script = MicroBatching(1)
    script._choosers["training"] = Script(trouble.sizes)
    assert_equal_weights(troubled, fit(LitSmall, script))
