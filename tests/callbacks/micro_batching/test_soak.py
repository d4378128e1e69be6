"""Many steps and any sizes: nothing grows, nothing drifts."""

import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.helpers import assert_equal_weights
from support.memory_limit import MemoryLimit
from support.micro_batching_models import Script
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_vram import AccumulationScheduler, MicroBatching

NUM_STEPS = 200


class LitSmall(pl.LightningModule):
    """Batch norm and dropout, or neither."""

    def __init__(self, batches: Any, *, norm: bool = True) -> None:
        super().__init__()
        pl.seed_everything(0, verbose=False)
        layers = (nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3)) if norm else (nn.Tanh(),)
        self.net = nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 1)).double()
        self.batches = batches
        self.gradients: list[Tensor] = []
        self.is_in_step = False

    def loss(self, x: Tensor) -> Tensor:
        return (self.net(x) - x.sum(-1, keepdim=True)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.is_in_step = True
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.is_in_step = False
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters()]))
        del self.gradients[20:]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)


class FreshBatches(Dataset):
    """Made when they are asked for, so that none stays alive."""

    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8, 4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


class Trouble(pl.Callback):
    """In one batch of ten memory runs out, somewhere between its first operator and its last."""

    def __init__(self, limit: MemoryLimit, model: LitSmall) -> None:
        self.random = random.Random(0)
        self.model = model
        self.countdown = -1
        self.sizes: list[int | None] = []
        self.live_bytes: list[int] = []
        limit.veto = self.strikes
        self.limit = limit

    def strikes(self) -> bool:
        if not (self.model.is_in_step or torch._C._current_graph_task_id() != -1):
            return False
        self.countdown -= 1
        return self.countdown == 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.countdown = self.random.randrange(1, 35) if self.random.random() < 0.1 else -1

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.countdown = -1

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.countdown = -1
        (callback,) = (one for one in trainer.callbacks if isinstance(one, MicroBatching))
        self.sizes.append(callback.micro_batch_size)
        self.live_bytes.append(self.limit.live_bytes)


@pytest.mark.slow
def test_many_steps_with_errors_in_one_of_ten_neither_leak_nor_drift(make_trainer) -> None:
    batches = FreshBatches()
    troubled = LitSmall(batches)
    limit = MemoryLimit()
    trouble = Trouble(limit, troubled)
    with limit:
        make_trainer(callbacks=[MicroBatching(regrow_after_n_batches=3), trouble], max_epochs=1).fit(troubled)
    assert limit.num_errors > 10
    assert 0 < limit.errors_in_backward < limit.num_errors
    assert {2, 4, 8} <= set(trouble.sizes)
    assert max(trouble.live_bytes[-50:]) <= max(trouble.live_bytes[50:150])
    smooth = LitSmall(batches)  # seeds again
    script = MicroBatching(1)
    script._choosers["training"] = Script(trouble.sizes)
    make_trainer(callbacks=[script], max_epochs=1).fit(smooth)
    assert_equal_weights(troubled, smooth)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch_sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    window=st.integers(1, 4),
    size=st.integers(1, 10),
    is_weighted=st.booleans(),
)
def test_any_batch_window_and_micro_batch_size_give_the_gradients_of_whole_batches(
    make_trainer: Callable[..., pl.Trainer],
    batch_sizes: list[int],
    window: int,
    size: int,
    is_weighted: bool,
) -> None:
    generator = torch.Generator().manual_seed(sum(batch_sizes))
    inputs = [torch.randn(num, 4, generator=generator, dtype=torch.float64) for num in batch_sizes]
    accumulation = AccumulationScheduler({0: window}, weight="samples" if is_weighted else None)
    split = LitSmall(inputs, norm=False)
    make_trainer(callbacks=[accumulation, MicroBatching(size)], max_epochs=1).fit(split)
    reference = LitSmall(inputs, norm=False)
    optimizer = reference.configure_optimizers()
    windows = [inputs[start : start + window] for start in range(0, len(inputs), window)]
    assert len(split.gradients) == len(windows)
    for gradient, parts in zip(split.gradients, windows, strict=True):
        optimizer.zero_grad()
        total = sum(map(len, parts))
        for x in parts:
            (reference.loss(x) * (len(x) / total if is_weighted else 1 / len(parts))).backward()
        expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
        assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
        optimizer.step()
