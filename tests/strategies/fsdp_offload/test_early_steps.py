"""Steps begin in the backward where nobody looks at gradients after it, and only there."""

import lightning.pytorch as pl
import pytest
import torch
from support.helpers import ForkingOffload
from support.offload_nets import Fused, leave_group

from lightning_vram import LeanMixedPrecision, MicroBatching, VRAMMonitor
from lightning_vram.strategies.fsdp_offload.early_steps import may_clip_late, may_step_early

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def _alone():
    yield
    leave_group()


class Asking(Fused):
    def on_train_batch_start(self, *unused):
        self.seen.append((may_step_early(self.trainer), may_clip_late(self.trainer)))


class Manual(Asking):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))


class ReadsGradients(Asking):
    def on_after_backward(self):
        assert self.net.head.weight.grad is not None


class ChangesGradients(Asking):
    def on_before_optimizer_step(self, optimizer):
        self.net.head.weight.grad.zero_()


class Clips(Asking):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.1, "norm")


class Reader(pl.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        assert pl_module.net.head.weight.grad is not None


class Timer(Reader):
    uses_gradients = False


class Backwards(pl.Callback):
    uses_gradients = True


CASES = [
    (Asking, dict, (True, True)),
    (Asking, lambda: {"callbacks": [VRAMMonitor()]}, (True, True)),
    (Asking, lambda: {"accumulate_grad_batches": 2}, (True, True)),
    (Asking, lambda: {"gradient_clip_val": 0.1}, (False, True)),
    (Asking, lambda: {"callbacks": [MicroBatching(2)]}, (False, True)),
    (Asking, lambda: {"callbacks": [Reader()]}, (False, True)),
    (Asking, lambda: {"callbacks": [Timer()]}, (True, True)),
    (Asking, lambda: {"callbacks": [Backwards()]}, (False, True)),
    (Asking, lambda: {"plugins": [LeanMixedPrecision("bf16")]}, (True, True)),
    (Asking, lambda: {"plugins": [LeanMixedPrecision("fp16")]}, (False, False)),
    (Asking, lambda: {"detect_anomaly": True}, (False, True)),
    (Manual, dict, (False, False)),
    (ReadsGradients, dict, (False, True)),
    (ChangesGradients, dict, (False, True)),
    (Clips, dict, (False, False)),
]


@pytest.mark.slow
@pytest.mark.quick_sample(3)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of callbacks, about the CPU
@pytest.mark.parametrize(("make", "make_arguments", "expected"), CASES)
def test_a_step_begins_early_where_nobody_can_tell(make, make_arguments, expected, make_trainer):
    model = make()
    make_trainer(strategy=ForkingOffload(), max_epochs=1, limit_val_batches=0, **make_arguments()).fit(model)
    assert set(model.seen) == {expected}


def test_a_hook_that_changes_gradients_is_heard(make_trainer):
    model = ChangesGradients()
    with torch.no_grad():
        model.net.head.weight.fill_(0.5)
    make_trainer(strategy=ForkingOffload(), limit_train_batches=1, max_epochs=1, limit_val_batches=0).fit(model)
    decayed = 0.5 * (1 - 1e-3 * 1e-2)  # learning rate and weight decay; the gradient is zero
    assert torch.allclose(model.net.head.weight, torch.full_like(model.net.head.weight, decayed), rtol=0, atol=1e-7)
