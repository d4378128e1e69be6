"""Micro-batches where memory really runs out."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.devices import ACCELERATOR, at_size, device_module, refuse_waits
from support.micro_batching_models import NotesSizes, with_sizes
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_vram import MicroBatching
from lightning_vram.memory.units import MIB

pytestmark = pytest.mark.device
# Maps of the whole batch of 16 MiB (simulated: 1 MiB), and next to no parameters. The first two batches of a step that
# may run again hold copies of their parts, as large as a map: room for the first, before there are optimizer states.
BATCH_SIZE, WIDTH, NUM_LAYERS = at_size((16384, 256, 24), (2048, 128, 6))
ROOM_BYTES = at_size(16 * MIB, MIB // 2)


class LitWide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        pl.seed_everything(0, verbose=False)
        self.net = nn.Sequential(
            *(layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)))
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(3 * BATCH_SIZE, WIDTH), batch_size=BATCH_SIZE)


@pytest.fixture
def limit_memory() -> Iterator[Any]:
    total = device_module().get_device_properties(0).total_memory

    def limit(num_bytes: int) -> None:
        gc.collect()
        device_module().empty_cache()
        device_module().set_per_process_memory_fraction(min(1.0, num_bytes / total))

    yield limit
    device_module().set_per_process_memory_fraction(1.0)


def fit(make_trainer, callbacks: list[pl.Callback], **options: Any) -> tuple[LitWide, int]:
    model = LitWide()
    gc.collect()
    device_module().empty_cache()
    device_module().reset_peak_memory_stats()
    make_trainer(callbacks=callbacks, accelerator=ACCELERATOR, devices=1, max_epochs=1, **options).fit(model)
    return model, device_module().max_memory_reserved()


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_batch_that_does_not_fit_trains_as_if_split_from_the_start(make_trainer, limit_memory, precision) -> None:
    _, quarter_bytes = fit(make_trainer, [MicroBatching(BATCH_SIZE // 4)], precision=precision)
    limit_memory(quarter_bytes + ROOM_BYTES)
    callback = MicroBatching(regrow_after_n_batches=None)
    notes = NotesSizes(callback)
    actual, _ = fit(make_trainer, [callback, notes], precision=precision)
    assert max(notes.sizes) < BATCH_SIZE
    # The second batch may run out as well, and be cut smaller: the optimizer's states came after the first.
    expected, _ = fit(make_trainer, [with_sizes(notes.sizes)], precision=precision)
    for name, tensor in actual.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), f"{name}, in parts of {notes.sizes}"


def test_without_an_error_no_rank_waits_for_the_device(make_trainer) -> None:
    """Nothing of "auto" reads a number back: a step enqueues while the last one runs."""

    class Guard(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            waits.enter_context(refuse_waits())

        def on_train_batch_end(self, *args: Any) -> None:
            waits.close()

        def on_exception(self, *args: Any) -> None:
            waits.close()

    with ExitStack() as waits:
        fit(make_trainer, [Guard(), MicroBatching()])
