"""Steps begin in the backward where nobody looks at gradients after it, and only there."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from support.helpers import ForkingOffload, LitManual, TinyGPT
from support.offload_nets import Fused

from lightning_vram import LeanMixedPrecision, MicroBatching
from lightning_vram.strategies.fsdp_offload import base

pytestmark = pytest.mark.distributed


class ChangesGradients(Fused):
    def on_before_optimizer_step(self, optimizer):
        self.net.head.weight.grad.zero_()


class Reader(pl.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        assert pl_module.net.head.weight.grad is not None


class Timer(Reader):
    uses_gradients = False


class Backwards(pl.Callback):
    uses_gradients = True


class Halves:
    """A mixin whose closure changes gradients between the backward and the step."""

    def halve(self, closure):
        loss = closure()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(torch.tensor([0.5, 2.0])[parameter.ndim % 2])
        return loss

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        super().optimizer_step(epoch, batch_idx, optimizer, partial(self.halve, closure))


class Wraps(Halves, Fused):
    pass


class GoesPast(Halves, Fused):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.optimizer.step(partial(self.halve, closure))


class WrapsLate(Halves, Fused):
    """The step of its optimizer is replaced when a strategy has it already."""

    def on_train_start(self):
        optimizer = self.optimizers().optimizer
        step = optimizer.step
        optimizer.step = lambda closure: step(partial(self.halve, closure))

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.step(closure=closure)


class Skips(Fused):
    """Calls its closure before the step, clips by hand, and leaves every second step out."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        closure()
        self.clip_gradients(optimizer, 0.01 if batch_idx % 2 else 0, "norm")
        if batch_idx % 2 == 0:
            optimizer.step()


class SchedulesInTheStep(Fused):
    def training_step(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 1e-3 * (self.global_step + 1)
        return super().training_step(batch, batch_idx)


CASES = [
    (Fused, dict, (True, None)),
    (Fused, lambda: {"accumulate_grad_batches": 2}, (True, None)),
    (Fused, lambda: {"gradient_clip_val": 0.1}, (False, True)),
    (Fused, lambda: {"callbacks": [MicroBatching(2)]}, (False, None)),
    (Fused, lambda: {"callbacks": [Reader()]}, (False, None)),
    (Fused, lambda: {"callbacks": [Timer()]}, (True, None)),
    (Fused, lambda: {"callbacks": [Backwards()]}, (False, None)),
    (Fused, lambda: {"plugins": [LeanMixedPrecision("bf16")]}, (True, None)),
    (Fused, lambda: {"plugins": [LeanMixedPrecision("fp16")]}, (None, None)),
    (Fused, lambda: {"detect_anomaly": True}, (False, None)),
    (SchedulesInTheStep, dict, (True, None)),
    (Wraps, dict, (False, None)),
    (GoesPast, dict, (False, None)),
    (WrapsLate, dict, (False, None)),
    (Skips, dict, (False, False)),
    (Fused, lambda: {"callbacks": [LambdaCallback(on_after_backward=lambda *_: None)]}, (False, None)),
    (lambda: LitManual(TinyGPT()), dict, (False, None)),
    (ChangesGradients, dict, (False, None)),
]


@pytest.mark.quick_sample(3)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of callbacks, about the CPU
@pytest.mark.parametrize(("make", "make_arguments", "expected"), CASES)
def test_a_step_begins_early_where_nobody_can_tell(make, make_arguments, expected, fit, monkeypatch):
    early, late = set(), set()
    make_early = base.make_early
    monkeypatch.setattr(base, "make_early", lambda trainer: noting(early, make_early(trainer)))
    monkeypatch.setattr(base, "may_clip_late", noting(late, base.may_clip_late))
    arguments = make_arguments()
    fit(make, *arguments.pop("callbacks", []), strategy=ForkingOffload(), **arguments)
    assert (early, late) == tuple({one} - {None} for one in expected)


def noting(notes, ask):
    def call(argument):
        notes.add(ask(argument))
        return ask(argument)

    return call


@pytest.mark.slow_except("Wraps", "SchedulesInTheStep", "Skips")
@pytest.mark.parametrize("make", [Wraps, GoesPast, WrapsLate, Skips, SchedulesInTheStep])
def test_what_a_step_does_around_its_closure_is_heard(make, same_in_modes):
    same_in_modes(make)


def test_it_tells_once_why_steps_wait_for_the_backward(fit, caplog):
    with caplog.at_level("INFO"):
        fit(Wraps, strategy=ForkingOffload())
    assert [message for message in caplog.messages if "after the backward" in message] == [
        "fsdp_offload steps the optimizer after the backward instead of layer by layer within it, because "
        "of the module's optimizer_step: the step overlaps only with the next forward."
    ]
