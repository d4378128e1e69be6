"""What hooks of a LightningModule see and do under ``fsdp_offload`` is what they see and do in a plain run."""

from functools import partial

import pytest
import torch
from support.helpers import ForkingOffload
from support.offload_nets import Fused, leave_group
from support.written_nets import (
    WAYS,
    Averaged,
    Clipped,
    ClippedByOptimizer,
    DecayedByHand,
    Normalized,
    Renormed,
    Sharpness,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from lightning_vram.private_names.fsdp2 import calls_derived_dispatch

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


class ReadsWeights(Fused):
    def note(self):
        self.seen.append(self.net.head.weight.norm().item())
        self.seen.append(sum(parameter.detach().square().sum().item() for parameter in self.parameters()))

    def on_train_start(self):
        self.note()

    def on_train_batch_start(self, batch, batch_idx):
        self.note()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note()

    def on_validation_epoch_start(self):
        self.note()


class ChangesGradients(Fused):
    def on_after_backward(self):
        self.seen.append(self.net.head.weight.grad.norm().item())

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.net.blocks.parameters():
            parameter.grad.mul_(0.5)
        self.net.head.weight.grad = self.net.head.weight.grad * 2

    def on_before_zero_grad(self, optimizer):
        self.seen.append(self.net.head.weight.grad is None)


class ClipsWithTorch(Fused):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)))


@pytest.mark.quick_sample(4)
@pytest.mark.parametrize("make", [ReadsWeights, ChangesGradients, ClipsWithTorch])
@pytest.mark.parametrize("mode", ["params", "optimizer", "none"])
def test_hooks(make, mode, same_in_modes):
    same_in_modes(make, (mode,), limit_val_batches=1)


class Samples(Fused):
    def on_validation_epoch_end(self):
        with torch.no_grad():
            self.seen.append(self.net(torch.arange(5)[None]).sum())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_network_may_be_called_outside_of_steps(precision, same_as_baseline):
    options = {"precision": precision, "limit_val_batches": 1}
    ours, plain = same_as_baseline(Samples, strategy=ForkingOffload(), **options)
    # the plain run takes the fast path of nn.TransformerEncoderLayer, which rounds in another way
    assert torch.allclose(torch.stack(ours.seen), torch.stack(plain.seen), rtol=1e-5, atol=1e-5)


class Late(Fused):
    """Makes a layer in ``configure_model``."""

    def __init__(self, make_layer):
        super().__init__()
        self.make_layer, self.extra = make_layer, None

    def configure_model(self):
        if self.extra is None:
            self.extra = self.make_layer(self)

    def loss(self, batch):
        return F.cross_entropy(self.extra(self.net(batch[0])).flatten(0, -2), batch[1].flatten())


def make_sharded(module):
    layer = nn.Linear(17, 17)
    strategy = module.trainer.strategy
    return fully_shard(layer, mesh=strategy.device_mesh) if isinstance(strategy, ForkingOffload) else layer


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # the user's own layer returns a view
@pytest.mark.parametrize("make_layer", [lambda _: nn.Linear(17, 17), make_sharded], ids=["plain", "sharded"])
def test_configure_model_is_honoured(make_layer, fit):
    plain, ours = (fit(partial(Late, make_layer), strategy=strategy) for strategy in ("auto", ForkingOffload()))
    for name, parameter in plain.named_parameters():
        own = ours.get_parameter(name)
        own = own.full_tensor() if hasattr(own, "full_tensor") else own
        assert torch.equal(own, parameter), name


class _Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((17, 17), 0.1))

    def forward(self, x):
        return x @ self.weight


def test_a_checkpoint_fills_layers_that_nothing_initializes(fit, make_trainer, tmp_path):
    make = partial(Late, lambda _: _Scale())
    saved = fit(make)
    saved.trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(TypeError, match=r"^Parameters or buffers on the meta device have no initial values: _Scale"):
        make_trainer(strategy=ForkingOffload(init_on_meta=True)).validate(make())
    leave_group()
    model = make()
    make_trainer(strategy=ForkingOffload(init_on_meta=True)).validate(model, ckpt_path=tmp_path / "plain.ckpt")
    assert torch.equal(model.extra.weight.full_tensor(), saved.extra.weight)


# --- writes to weights by hand ---


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("where", ["step", "end of the batch", "before zero_grad"])
@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_is_the_average_of_its_student(where, way, same_in_modes):
    precision = "32-true" if where == "end of the batch" else "bf16-mixed"
    modes = ("params", "none" if way == "data =" else "all in the root")
    same_in_modes(lambda: Averaged(where, WAYS[way]), modes, precision=precision)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("make", [Clipped, Normalized, Renormed])
def test_weights_that_are_changed_by_hand_are_those_of_a_plain_run(make, same_in_modes):
    same_in_modes(make, ("params", "all in the root"))


@pytest.mark.slow_except("params-Sharpness", "optimizer-ClippedByOptimizer", "none-DecayedByHand")
@pytest.mark.parametrize("make", [ClippedByOptimizer, Sharpness, DecayedByHand])
@pytest.mark.parametrize("mode", ["params", "all in the root", "optimizer", "none"])
def test_what_is_changed_by_way_of_the_optimizer_counts_in_the_step(make, mode, same_in_modes):
    if make is Sharpness and not calls_derived_dispatch:
        pytest.skip("writes to shards beside what is gathered are not seen before torch 2.13")
    same_in_modes(make, (mode,))
