"""Weights are those of the plain run to the bit, whoever else has a say in gradients; and when there still are some."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.helpers import ForkingOffload, LitManual, LitTiny, TinyGPT, assert_equal_weights

from lightning_vram import AccumulationScheduler, LeanMixedPrecision, MicroBatching
from lightning_vram.callbacks.early_release import EarlyRelease

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning, on small data
# Two epochs of three batches. Validation after each frees all gradients.
PLAIN, FREED = 4, 0
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "accumulation": ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}, PLAIN, 2),
    "clipping by value": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, PLAIN, FREED),
    "bf16-mixed": ({"precision": "bf16-mixed"}, PLAIN, FREED),
    "16-mixed": ({"precision": "16-mixed", "gradient_clip_val": 0.01}, PLAIN, FREED),
    "LeanMixedPrecision": (
        {"plugins": lambda: LeanMixedPrecision("fp16"), "gradient_clip_val": 0.01},
        PLAIN,
        FREED,
    ),
    "lean weights": ({"plugins": lambda: LeanMixedPrecision("bf16", parameters="bf16+kahan")}, PLAIN, FREED),
    "MicroBatching": ({"callbacks": lambda: MicroBatching(3)}, 6 + PLAIN, 6 + FREED),  # two parts per batch
    "MicroBatching, accumulation": (
        {"callbacks": lambda: MicroBatching("auto"), "accumulate_grad_batches": 2},
        PLAIN,
        2,
    ),
    "AccumulationScheduler": ({"callbacks": lambda: AccumulationScheduler(by_epoch={0: 2, 1: 3})}, PLAIN, 1 + 2),
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


def fit(make_trainer: Callable[..., pl.Trainer], model: type[LitTiny], *callbacks: pl.Callback, **case: Any) -> LitTiny:
    pl.seed_everything(0, verbose=False)  # also of the data
    case = {name: value() if callable(value) else value for name, value in case.items()}
    others = [case.pop("callbacks")] if "callbacks" in case else []
    module = model(TinyGPT())
    make_trainer(callbacks=[*callbacks, *others], **case).fit(module)
    return module


@pytest.mark.slow_except("accumulation", "16-mixed", "lean weights", "MicroBatching", "fsdp_offload")
@pytest.mark.parametrize("name", CASES)
def test_one_process(name, make_trainer):
    case, num_plain, num_early = CASES[name]
    counts = Counting(), Counting()
    plain = fit(make_trainer, LitTiny, counts[0], **case)
    early = fit(make_trainer, LitTiny, EarlyRelease(), counts[1], **case)
    assert_equal_weights(early, plain)
    assert [counting.num_steps for counting in counts] == [num_plain, num_early]


@pytest.mark.parametrize("name", ["MicroBatching", "AccumulationScheduler"])
def test_the_order_of_callbacks_does_not_matter(name, make_trainer):
    case, _, num_early = CASES[name]
    counting = Counting()
    plain = fit(make_trainer, LitTiny, **case)
    early = fit(make_trainer, LitTiny, case["callbacks"](), EarlyRelease(), counting)
    assert_equal_weights(early, plain)
    assert counting.num_steps == num_early


def test_two_optimizers_of_manual_optimization(make_trainer):
    assert_equal_weights(fit(make_trainer, LitManual, EarlyRelease()), fit(make_trainer, LitManual))


@pytest.mark.distributed
@pytest.mark.slow_except("ddp_fork")
@pytest.mark.parametrize("strategy", ["ddp_fork", ForkingOffload])
def test_two_ranks(strategy, make_trainer):
    case = {"strategy": strategy, "devices": 2, "accumulate_grad_batches": 2, "max_epochs": 1}
    plain = fit(make_trainer, LitTiny, **case)
    early = fit(make_trainer, LitTiny, EarlyRelease(collect_every_n_steps=1), **case)
    assert_equal_weights(early, plain)


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
def test_what_has_come_since_is_zeroed_where_it_was(kind, make_trainer):
    assert_equal_weights(fit(make_trainer, kind, EarlyRelease()), fit(make_trainer, kind))
