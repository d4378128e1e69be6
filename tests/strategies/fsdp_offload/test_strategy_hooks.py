"""What hooks of a LightningModule see and do under ``fsdp_offload`` is what they see and do in a plain run."""

import lightning.pytorch as pl
import pytest
import torch
from support.helpers import ForkingOffload, assert_equal_weights
from support.offload_nets import MODES, Fused, leave_group
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def _alone():
    yield
    leave_group()


@pytest.fixture
def fit_both(make_trainer):
    def fit_both(make, mode="params", **arguments):
        """Return the plain model and ours."""
        fitted = []
        for strategy in ("auto", ForkingOffload(**MODES[mode])):
            pl.seed_everything(0, verbose=False)
            fitted.append(make())
            make_trainer(strategy=strategy, max_epochs=1, **arguments).fit(fitted[-1])
        return fitted

    return fit_both


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


class ClipsByItself(Fused):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.05, "norm")
        self.seen.append(self.net.head.weight.grad.norm().item())


class ClipsWithTorch(Fused):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)))


class StepsByHand(Fused):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        self.seen.append(self.net.head.weight.grad.norm().item())
        optimizer.step()


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("make", [ReadsWeights, ChangesGradients, ClipsByItself, ClipsWithTorch, StepsByHand])
@pytest.mark.parametrize("mode", ["params", "optimizer", "none"])
def test_hooks(make, mode, fit_both):
    plain, ours = fit_both(make, mode)
    assert_equal_weights(ours, plain)
    assert ours.seen == plain.seen


class Samples(Fused):
    def on_validation_epoch_end(self):
        with torch.no_grad():
            self.seen.append(self.net(torch.arange(5)[None]).sum())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_network_may_be_called_outside_of_steps(precision, fit_both):
    plain, ours = fit_both(Samples, precision=precision)
    assert_equal_weights(ours, plain)
    # the plain run takes the fast path of nn.TransformerEncoderLayer, which rounds in another way
    assert torch.allclose(torch.stack(ours.seen), torch.stack(plain.seen), rtol=1e-5, atol=1e-5)


class Late(Fused):
    """Makes a layer in ``configure_model``, and may shard it."""

    is_sharded = False

    def __init__(self):
        super().__init__()
        self.extra = None

    def configure_model(self):
        if self.extra is None:
            self.extra = nn.Linear(17, 17)
            nn.init.eye_(self.extra.weight)
            if self.is_sharded and isinstance(self.trainer.strategy, ForkingOffload):
                fully_shard(self.extra, mesh=self.trainer.strategy.device_mesh)

    def loss(self, batch):
        return F.cross_entropy(self.extra(self.net(batch[0])).flatten(0, -2), batch[1].flatten())


class LateSharded(Late):
    is_sharded = True


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # the user's own layer returns a view
@pytest.mark.parametrize("make", [Late, LateSharded])
def test_configure_model_is_honoured(make, fit_both):
    plain, ours = fit_both(make)
    for name, parameter in plain.named_parameters():
        own = ours.get_parameter(name)
        own = own.full_tensor() if hasattr(own, "full_tensor") else own
        assert torch.equal(own, parameter), name


class OnMeta(Late):
    def configure_model(self):
        if self.extra is None:
            with torch.device("meta"):
                self.extra = nn.Linear(17, 17)


def test_layers_on_the_meta_device_get_values(make_trainer):
    model = OnMeta()
    make_trainer(strategy=ForkingOffload(), max_epochs=1).fit(model)
    assert not model.extra.weight.is_meta
    assert torch.isfinite(model.extra.weight.full_tensor()).all()


class WithoutInitializer(Late):
    def configure_model(self):
        if self.extra is None:
            self.extra = _Scale()


class _Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((17, 17), 0.1))

    def forward(self, x):
        return x @ self.weight


def test_a_checkpoint_fills_layers_that_nothing_initializes(make_trainer, tmp_path):
    saved = WithoutInitializer()
    trainer = make_trainer(max_epochs=1)
    trainer.fit(saved)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(TypeError, match=r"^Parameters or buffers on the meta device have no initial values: _Scale"):
        make_trainer(strategy=ForkingOffload(init_on_meta=True)).validate(WithoutInitializer())
    leave_group()
    model = WithoutInitializer()
    trainer = make_trainer(strategy=ForkingOffload(init_on_meta=True))
    trainer.validate(model, ckpt_path=tmp_path / "plain.ckpt")
    assert torch.equal(model.extra.weight.full_tensor(), saved.extra.weight)
