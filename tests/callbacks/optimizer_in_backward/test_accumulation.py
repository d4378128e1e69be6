"""``OptimizerInBackward(keep_gradients=False)``: moments take gradients in, as Adam accumulation has it."""

import re
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import assert_equal_weights
from support.host_layers import ADAMW, Layers
from support.offload_nets import leave_group
from torch import Tensor, nn
from torch.optim import Adam, AdamW, RMSprop

from lightning_vram import AccumulationScheduler, MomentsInBF16, OptimizerInBackward
from lightning_vram.demos import ByteGPT, SourceText

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
IN_MOMENTS = partial(OptimizerInBackward, keep_gradients=False)


class Odd(Layers):
    """A layer has no part in every third batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.extra(batch).square().mean() if batch_idx % 3 else loss

    def __init__(self, optimizer: Any = ADAMW) -> None:
        super().__init__(optimizer, num_batches=8)
        self.extra = nn.Linear(16, 2)


def by_hand(num_epochs: int, rate: float = 1e-2, decay: float = 1e-2) -> Any:
    """Train as the paper has it, with decoupled weight decay; the last window of an epoch has two batches."""
    pl.seed_everything(0, verbose=False)
    model = Odd()
    model.trainer = pl.Trainer(logger=False, enable_checkpointing=False)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
    batches, step = list(model.train_dataloader()), 0
    for _ in range(num_epochs):
        for start in range(0, len(batches), 3):
            step += 1
            for first, second in moments:
                first.mul_(0.9)
                second.mul_(0.999)
            for number in range(start, min(start + 3, len(batches))):
                loss = model.training_step(batches[number], number) / 3
                gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
                for (first, second), gradient in zip(moments, gradients, strict=True):
                    if gradient is not None:
                        first += 0.1 * gradient
                        second += 0.001 * gradient**2
            with torch.no_grad():
                for p, (first, second) in zip(model.parameters(), moments, strict=True):
                    p *= 1 - rate * decay
                    p -= rate * first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    return model


@pytest.mark.parametrize("is_fused", [False, True])
def test_weights_are_those_of_the_paper(is_fused, fit):
    make = partial(Odd, partial(AdamW, lr=1e-2, fused=is_fused))
    ours = fit(make, IN_MOMENTS(), max_epochs=2, accumulate_grad_batches=3)
    for one, other in zip(ours.parameters(), by_hand(2).parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_without_accumulation_it_is_the_plain_run(same_as_baseline):
    same_as_baseline(Odd, IN_MOMENTS())


def test_a_resumed_run_ends_at_the_same_bits(fit, tmp_path):
    window = {"accumulate_grad_batches": 3}
    fit(Odd, IN_MOMENTS(), **window).trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = fit(Odd, IN_MOMENTS(), ckpt_path=tmp_path / "last.ckpt", max_epochs=2, **window)
    assert_equal_weights(resumed, fit(Odd, IN_MOMENTS(), max_epochs=2, **window))


@pytest.mark.slow
def test_the_loss_is_near_that_of_the_plain_run(fit):
    def loss(*callbacks: Any) -> float:
        losses: list[float] = []
        note = LambdaCallback(on_train_batch_end=lambda *args: losses.append(4 * float(args[2]["loss"])))
        options = {"max_epochs": -1, "max_steps": 200, "accumulate_grad_batches": 4}
        fit(Bytes, note, *callbacks, **options)
        return sum(losses[-80:]) / 80

    assert loss(IN_MOMENTS()) == pytest.approx(loss(), rel=0.02)


class Bytes(ByteGPT):
    def __init__(self) -> None:
        super().__init__(num_layers=2, width=64, sequence_length=64)

    def train_dataloader(self) -> Any:
        data = SourceText(batch_size=2, sequence_length=64)
        data.setup("fit")
        return data.train_dataloader()


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "what", "instead"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val", "no clipping"),
        ({"plugins": [MixedPrecision("16-mixed", "cpu")]}, "a GradScaler", "precision='bf16-mixed'"),
        ({"strategy": "ddp", "devices": 1}, "DDPStrategy", "a single device"),
        ({"callbacks": [AccumulationScheduler({0: 2})]}, "AccumulationScheduler", "no AccumulationScheduler"),
    ],
    ids=["clipping", "scaler", "ddp", "scheduler"],
)
def test_what_needs_whole_gradients_is_refused(options, what, instead, make_trainer):
    message = (
        f"OptimizerInBackward(keep_gradients=False) does not work with {what}, which needs the gradients of all "
        f"micro-batches at once: use {instead}, or keep_gradients=True."
    )
    options = {**options, "callbacks": [IN_MOMENTS(), *options.get("callbacks", [])]}
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        make_trainer(**options).fit(Layers(num_batches=1))
    leave_group()


NAME = "OptimizerInBackward(keep_gradients=False)"


@pytest.mark.parametrize(
    ("optimizer", "others", "message"),
    [
        (
            RMSprop,
            [],
            f"{NAME} is for Adam and AdamW of torch.optim, got RMSprop: use one of these, or keep_gradients=True.",
        ),
        (
            partial(Adam, betas=(0.0, 0.9)),
            [],
            f"{NAME} needs betas above 0, got (0.0, 0.9) in Adam: use others, or keep_gradients=True.",
        ),
        (
            AdamW,
            [MomentsInBF16()],
            f"{NAME} does not work with low-precision moments, which would be rounded in each micro-batch: leave "
            "MomentsInBF16 or LowBitOptimizer out, or keep_gradients=True.",
        ),
    ],
    ids=["optimizer", "betas", "moments"],
)
def test_states_that_cannot_take_gradients_in_are_refused(optimizer, others, message, make_trainer):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_trainer(callbacks=[*others, IN_MOMENTS()]).fit(Layers(optimizer, num_batches=1))
