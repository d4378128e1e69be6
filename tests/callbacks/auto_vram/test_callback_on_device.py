"""A plan is made, kept and mended where memory really runs out."""

import gc
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.devices import ACCELERATOR, DEVICE, at_size, device_module
from support.helpers import assert_equal_weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_vram import ActivationCheckpointing, AutoVRAM
from lightning_vram.callbacks.auto_vram import callback
from lightning_vram.memory.device.accelerators import limited_share
from lightning_vram.memory.units import MIB

pytestmark = pytest.mark.device
# Maps of 2 MiB (on a GPU 16), far more than the parameters.
BATCH_SIZE, WIDTH, NUM_LAYERS = at_size((16384, 256, 12), (4096, 128, 6))
CALLBACK = "lightning_vram.callbacks.auto_vram.callback"


class Block(nn.Sequential):
    def __init__(self) -> None:
        linears = (layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        super().__init__(*linears, nn.Dropout(0.1))


class LitWide(pl.LightningModule):
    num_batches = 3

    def __init__(self, before_step: Callable[["LitWide"], None] = lambda module: None) -> None:
        super().__init__()
        pl.seed_everything(0, verbose=False)
        self.net = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.before_step = before_step

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.before_step(self)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(self.num_batches * BATCH_SIZE, WIDTH, generator=generator)
        return DataLoader(data, batch_size=BATCH_SIZE)


class LitLong(LitWide):
    num_batches = 8


def fit(make_trainer: Any, module: LitWide, *callbacks: pl.Callback, **options: Any) -> int:
    """Return the most that was reserved; the Trainer has to be as it was."""
    pl.seed_everything(1, verbose=False)
    gc.collect()
    device_module().empty_cache()
    device_module().reset_peak_memory_stats()
    trainer = make_trainer(callbacks=[*callbacks], accelerator=ACCELERATOR, devices=1, max_epochs=1, **options)
    own = list(trainer.callbacks)
    trainer.fit(module)
    assert trainer.callbacks == own
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    return int(device_module().max_memory_reserved())


@pytest.fixture(autouse=True)
def _know_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure it takes more memory than these models, and of a simulation it says nothing."""
    monkeypatch.setattr("lightning_vram.callbacks.auto_vram.decision.measure_bus", lambda device: 1e9)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the callback says."""
    lines: list[str] = []
    for name in ("rank_zero_info", "rank_zero_warn"):
        monkeypatch.setattr(f"{CALLBACK}.{name}", lines.append)
    return lines


def test_a_run_that_fits_is_left_alone(make_trainer, said):
    plain, planned = LitWide(), LitWide()
    plain_bytes = fit(make_trainer, plain)
    assert fit(make_trainer, planned, AutoVRAM()) == plain_bytes
    assert_equal_weights(planned, plain)
    (line,) = said
    assert "Fits without changes" in line


@pytest.mark.slow_except("32-true")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_share_of_the_plain_peak_is_kept_and_weights_are_equal(make_trainer, said, precision):
    plain, planned = LitWide(), LitWide()
    # toys in 16 bit take little beside the workspaces of a GPU, which an estimate counts
    share = at_size(0.5, 0.5 if precision == "32-true" else 0.75)
    budget_bytes = int(share * fit(make_trainer, plain, precision=precision))
    assert fit(make_trainer, planned, AutoVRAM(budget_bytes), precision=precision) <= budget_bytes
    assert_equal_weights(planned, plain)
    assert "ActivationCheckpointing" in said[0]


class RunsOut:
    """Says that there is no more memory, in the forward of the second batch and in what is tried again.

    Args:
        num_times: How often; ``None``: always.
    """

    def __init__(self, num_times: int | None) -> None:
        self.left = float("inf") if num_times is None else num_times

    def __deepcopy__(self, memo: Any) -> Callable[[LitWide], None]:
        return lambda module: None  # steps without memory do not run out of it

    def __call__(self, module: LitWide) -> None:
        if module.global_step == 1 and self.left > 0:
            self.left -= 1
            raise torch.OutOfMemoryError("out of memory")


def test_a_run_that_should_have_fitted_as_it_is_is_checkpointed(make_trainer, said):
    plain, planned = LitWide(), LitWide(RunsOut(1))
    budget_bytes = int(1.1 * fit(make_trainer, plain))
    fit(make_trainer, planned, AutoVRAM(budget_bytes))
    assert_equal_weights(planned, plain)
    assert "Fits without changes" in said[0]
    assert said[1].endswith("It is repeated with ActivationCheckpointing.")


class LitUntraceable(LitWide):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if type(batch) is not Tensor:
            raise RuntimeError("real tensors only")
        return super().training_step(batch, batch_idx)


def test_a_step_that_cannot_be_planned_is_checkpointed_once_memory_has_run_out(make_trainer, said):
    plain, planned = LitUntraceable(), LitUntraceable(RunsOut(1))
    fit(make_trainer, plain)
    fit(make_trainer, planned, AutoVRAM())
    assert_equal_weights(planned, plain)
    assert said[0].endswith("The run starts unchanged; if a step runs out of memory, layers are checkpointed.")
    assert said[1].endswith("It is repeated with ActivationCheckpointing.")


def test_a_budget_is_enforced_where_a_step_cannot_be_planned(make_trainer, said):
    plain, planned = LitUntraceable(), LitUntraceable()
    budget_bytes = int(0.75 * fit(make_trainer, plain))
    assert fit(make_trainer, planned, AutoVRAM(budget_bytes)) <= budget_bytes
    assert_equal_weights(planned, plain)
    (message,) = said
    _, done = message.splitlines()
    assert done.startswith("The run continues without a plan: repeated layers are checkpointed, the limit of")
    assert done.endswith(" is enforced.")
    assert limited_share(torch.device(DEVICE, 0)) == 1


def test_where_checkpointing_is_not_enough_batches_run_in_parts_at_the_budget(make_trainer, said):
    class LitCounts(LitUntraceable):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            sizes.add(len(batch))
            return super().training_step(batch, batch_idx)

    sizes: set[int] = set()
    plain, checkpointed, planned = LitWide(), LitUntraceable(), LitCounts()
    fit(make_trainer, plain)
    budget_bytes = fit(make_trainer, checkpointed, ActivationCheckpointing()) - 6 * MIB
    assert fit(make_trainer, planned, AutoVRAM(budget_bytes, allow="lossless")) <= budget_bytes
    assert min(sizes) <= BATCH_SIZE // 2
    assert "a batch that runs out of memory is split into micro-batches" in said[0]


@pytest.mark.parametrize("has_run_over", [False, True])
def test_the_first_steps_correct_the_plan_and_change_no_result(make_trainer, said, monkeypatch, has_run_over):
    """What a step takes is what is given out here: times of a simulation mean nothing."""
    plain, planned = LitLong(), LitLong()
    budget_bytes = int(0.75 * fit(make_trainer, plain))
    auto = AutoVRAM(budget_bytes)
    correct, took_bytes = callback._correct, budget_bytes + MIB if has_run_over else 0
    monkeypatch.setattr(callback, "_correct", lambda plan, ranks, *_: correct(plan, ranks, 1.0, took_bytes))
    fit(make_trainer, planned, auto)
    assert_equal_weights(planned, plain)
    (line,) = (line for line in said if "a step takes 1000.0 ms" in line)
    assert ("The run continues with EarlyRelease + ActivationCheckpointing" in line) == has_run_over
