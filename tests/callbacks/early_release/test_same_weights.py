"""Weights are those of the plain run to the bit, whoever else has a say in gradients; and when there still are some."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.helpers import ForkingOffload, LitTiny, TinyGPT

from lightning_vram import AccumulationScheduler, LeanMixedPrecision, MicroBatching
from lightning_vram.callbacks.early_release import EarlyRelease

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning, on small data
# Two epochs of three batches. Validation after each frees all gradients.
PLAIN, FREED = 4, 0
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "accumulation": ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}, PLAIN, 2),
    "16-mixed": ({"precision": "16-mixed", "gradient_clip_val": 0.01}, PLAIN, FREED),
    "lean weights": ({"plugins": lambda: LeanMixedPrecision("bf16", parameters="bf16+kahan")}, PLAIN, FREED),
    "MicroBatching": ({"callbacks": lambda: [MicroBatching(3)]}, 6 + PLAIN, 6 + FREED),  # two parts per batch
    "AccumulationScheduler": ({"callbacks": lambda: [AccumulationScheduler(by_epoch={0: 2, 1: 3})]}, PLAIN, 1 + 2),
    "fsdp_offload": ({"strategy": ForkingOffload, "gradient_clip_val": 0.01}, PLAIN, PLAIN),
    "fsdp_offload, all on the device": ({"strategy": lambda: ForkingOffload(offload="none")}, PLAIN, FREED),
}


class Counting(pl.Callback):
    """Counts the training steps that begin with gradients."""

    num_steps = 0

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        step = module.training_step

        def training_step(*args: Any) -> torch.Tensor:
            self.num_steps += any(parameter.grad is not None for parameter in module.parameters())
            return step(*args)

        module.training_step = training_step


def compare(same_as_baseline: Callable[..., Any], case: dict[str, Any], *, is_first: bool = True) -> list[int]:
    """Train without and with, before others or behind them; returns how many steps each began with gradients."""
    counts = Counting(), Counting()
    baseline, options = ({name: one() if callable(one) else one for name, one in case.items()} for _ in counts)
    baseline["callbacks"] = [*baseline.get("callbacks", []), counts[0]]
    others = options.pop("callbacks", [])
    early = [EarlyRelease(), *others] if is_first else [*others, EarlyRelease()]
    options |= {"max_epochs": 2, "limit_val_batches": 1}
    same_as_baseline(lambda: LitTiny(TinyGPT()), *early, counts[1], baseline=baseline, **options)
    return [counting.num_steps for counting in counts]


@pytest.mark.slow_except("accumulation", "lean weights", "fsdp_offload")
@pytest.mark.parametrize("name", CASES)
def test_one_process(name, same_as_baseline):
    case, num_plain, num_early = CASES[name]
    assert compare(same_as_baseline, case) == [num_plain, num_early]


@pytest.mark.parametrize("name", ["MicroBatching", "AccumulationScheduler"])
def test_the_order_of_callbacks_does_not_matter(name, same_as_baseline):
    case, num_plain, num_early = CASES[name]
    assert compare(same_as_baseline, case, is_first=False) == [num_plain, num_early]


class FillsInTheStep(LitTiny):
    """Its step runs a backward of its own, which zeroing throws away in a plain run."""

    def training_step(self, batch, batch_idx):
        self.loss(batch).backward()
        return super().training_step(batch, batch_idx)


class Closing(LitTiny):
    """An optimizer that evaluates the loss several times per step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


@pytest.mark.parametrize("kind", [FillsInTheStep, Closing])
def test_what_has_come_since_is_zeroed_where_it_was(kind, same_as_baseline):
    same_as_baseline(lambda: kind(TinyGPT()), EarlyRelease())
