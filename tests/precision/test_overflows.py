"""float16 on a CPU: each defect of Lightning's plugin, with its number beside ours."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import LitTiny, TinyCNN
from torch import nn
from torch.utils.data import DataLoader

from lightning_vram import LeanMixedPrecision

INF = float("inf")


class Scripted(pl.LightningModule):
    """One weight, whose gradient is what the batch says."""

    def __init__(self, gradients, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.gradients, self.options = torch.tensor(gradients), options

    def loss(self, batch):
        return (batch * self.weight).sum()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([self.weight], lr=1.0, **self.options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self):
        return DataLoader(self.gradients, batch_size=1)


class ByHand(Scripted):
    """The same with manual optimization; ``overflows`` are what it was told of each step."""

    def __init__(self, gradients, step=lambda module, optimizer: optimizer.step()):
        super().__init__(gradients)
        self.automatic_optimization, self.step, self.overflows = False, step, []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.step(self, optimizer)
        self.overflows.append(self.trainer.precision_plugin.overflow_steps)

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=1.0)


def plugin_for(**options):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    return LeanMixedPrecision("fp16", scaler=scaler, **options)


@pytest.fixture
def train(fit):
    """Fit a model with a plugin, or the one for float16, and return it."""
    return lambda model, plugin=None, **options: fit(lambda: model, plugins=[plugin or plugin_for()], **options)


def assert_weight(model, value):
    torch.testing.assert_close(model.weight, torch.full((4,), value))


def clip_and_step(module, optimizer):
    module.clip_gradients(optimizer, 0.1)
    optimizer.step()


def test_manual_clipping_sees_unscaled_gradients(train):
    # Lightning clips what is scaled, and unscales that: the step has norm 0.1 / 1024.
    # https://github.com/Lightning-AI/pytorch-lightning/issues/18089
    assert_weight(train(ByHand([3.0], clip_and_step)), -0.05)


def unscale_clip_and_step(module, optimizer):
    """What is done about that issue elsewhere."""
    module.trainer.precision_plugin.scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([module.weight], 1.0)
    optimizer.step()


def test_gradients_that_were_unscaled_by_hand_are_not_unscaled_again(train):
    assert_weight(train(ByHand([3.0, 4.0, 5.0], unscale_clip_and_step)), -1.5)


def test_the_user_can_tell_a_step_that_was_skipped(train):
    model = train(ByHand([1.0, INF, 1.0]))
    assert model.overflows == [0, 1, 1]
    assert model.trainer.scaler.get_scale() == 512


class ByTheScaler(ByHand):
    """With the scaler alone, as in plain PyTorch."""

    def training_step(self, batch, batch_idx):
        optimizer, scaler = self.optimizers(use_pl_optimizer=False), self.trainer.scaler
        optimizer.zero_grad()
        scaler.scale(self.loss(batch)).backward()
        self.step(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("unscales", [False, True])
def test_steps_by_the_scaler_alone(unscales, train):
    model = train(ByTheScaler([3.0, INF, 4.0], lambda scaler, optimizer: unscales and scaler.unscale_(optimizer)))
    assert_weight(model, -7.0)
    assert model.trainer.scaler.get_scale() == 512


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_fused_optimizers_are_clipped(algorithm, train):
    # Lightning: RuntimeError, "does not allow for gradient clipping because it performs unscaling internally".
    options = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    fitted = [train(Scripted([3.0, 2.0, INF, 1.0], fused=is_fused), **options) for is_fused in (False, True)]
    torch.testing.assert_close(fitted[0].weight, fitted[1].weight, rtol=1e-6, atol=0)
    assert fitted[1].trainer.precision_plugin.overflow_steps == 1


def test_a_hook_before_the_step_sees_unscaled_gradients_of_a_fused_optimizer(train):
    seen = []
    model = Scripted([3.0], fused=True)
    model.on_before_optimizer_step = lambda optimizer: seen.extend(model.weight.grad.tolist())
    train(model)
    assert seen == [3.0] * 4


GRADIENTS = [INF, 1.0, INF, INF, 1.0, 1.0, INF, 1.0]


@pytest.mark.filterwarnings("ignore:Detected call of")  # where it does not wait
@pytest.mark.parametrize("holds", [True, False])
def test_the_learning_rate_waits_for_steps_that_were_skipped(holds, train):
    # Lightning steps the schedule 8 times, at 4 steps of the optimizer.
    model = train(Scripted(GRADIENTS), plugin_for(hold_lr_on_overflow=holds))
    plugin, (schedule,) = model.trainer.precision_plugin, model.trainer.lr_scheduler_configs
    assert schedule.scheduler.get_last_lr() == [0.5 ** (4 if holds else 8)]
    assert plugin.overflow_steps == 4
    assert plugin.scaler.get_scale() == 1024 / 2**4
    if holds:
        assert_weight(model, -(1 + 0.5 + 0.25 + 0.125))


def test_a_schedule_waits_in_steps_where_gradients_are_accumulated(train):
    trainer = train(Scripted([1.0, INF, 1.0, 1.0, 1.0, 1.0]), accumulate_grad_batches=2).trainer
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.5**2]


class EveryEpoch(Scripted):
    def configure_optimizers(self):
        configuration = super().configure_optimizers()
        configuration["lr_scheduler"]["interval"] = "epoch"
        return configuration


def test_a_schedule_by_epochs_does_not_wait(train):
    trainer = train(EveryEpoch([1.0, INF])).trainer
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.5]


def test_overflows_are_logged(train):
    metrics = train(Scripted(GRADIENTS), log_every_n_steps=1).trainer.logged_metrics
    assert metrics == {"vram/overflow_steps": 4, "vram/loss_scale": 64}


class SomeLosses(Scripted):
    """Has a loss for some batches."""

    def __init__(self, gradients, batches):
        super().__init__(gradients)
        self.batches = batches

    def training_step(self, batch, batch_idx):
        return self.loss(batch) if batch_idx in self.batches else None


@pytest.mark.filterwarnings("ignore:.*returned .None.", "ignore:Detected call of")
def test_a_training_step_may_return_none(train):
    assert train(SomeLosses([1.0, 1.0, 2.0], {2})).weight[0] < 0


@pytest.mark.filterwarnings("ignore:.*returned .None.")
def test_a_window_whose_last_batch_has_no_loss_makes_its_step(train):
    # Lightning drops the window.
    assert_weight(train(SomeLosses([2.0, 1.0], {0}), accumulate_grad_batches=2), -1.0)


class ManySteps(ByHand):
    """As PPO: fifty steps per batch, each of its own backward; the second one overflows."""

    def training_step(self, batch, batch_idx):
        for index in range(50):
            super().training_step(batch * (INF if index == 1 else 1.0), batch_idx)


def test_one_of_many_steps_in_a_training_step_may_overflow(train):
    model = train(ManySteps([1.0]))
    assert_weight(model, -49.0)
    assert model.trainer.precision_plugin.overflow_steps == 1
    assert model.trainer.precision_plugin.scaler.get_scale() == 512


@pytest.mark.parametrize("make", [Scripted, ByHand])
def test_too_many_overflows_in_a_row_end_the_run_and_the_next_one_counts_its_own(make, train):
    plugin = plugin_for(max_consecutive_overflows=3)
    with pytest.raises(FloatingPointError, match=r"in 3 optimizer steps in a row, down to a loss scale of 32.*fp32_m"):
        train(make([INF, INF, 1.0, INF, INF, INF, 1.0]), plugin)
    train(make([INF, 1.0]), plugin)
    assert plugin.overflow_steps == 6


@pytest.mark.parametrize("make", [Scripted, ByHand])
@pytest.mark.parametrize(("target", "precision"), [("bf16", "bf16-mixed"), ("fp32", "32-true")])
def test_a_run_goes_on_in_another_format_where_that_is_asked_for(make, target, precision, train):
    plugin = plugin_for(max_consecutive_overflows=2, on_overflow_limit=target)
    with pytest.warns(UserWarning, match=f"overflowed in 2 optimizer steps in a row. Training continues in {target}"):
        model = train(make([1.0, INF, INF, 2.0, 4.0]), plugin)
    assert model.trainer.precision == precision
    assert_weight(model, -(1.0 + 2 * 0.5 + 4 * 0.25) if make is Scripted else -7.0)


class Looks(Scripted):
    def validation_step(self, batch, batch_idx):
        self.seen = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")

    def val_dataloader(self):
        return DataLoader(torch.ones(1), batch_size=1)


def test_a_run_that_went_on_in_another_format_is_evaluated_in_it_and_stays_there_when_resumed(train, tmp_path):
    def make():
        return plugin_for(max_consecutive_overflows=1, on_overflow_limit="bf16")

    with pytest.warns(UserWarning, match="continues in bf16"):
        model = train(Looks([INF, 1.0]), make())
    trainer = model.trainer
    trainer.limit_val_batches = 1.0
    trainer.validate(model, verbose=False)
    assert model.seen == (torch.bfloat16, True)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = train(Scripted([1.0, 1.0]), make(), max_epochs=2, ckpt_path=tmp_path / "last.ckpt").trainer
    assert resumed.precision == "bf16-mixed"
    assert resumed.precision_plugin.scaler is None


class Diverges(Scripted):
    """Overflows as soon as the learning rate is large."""

    lr = 1e-3

    def training_step(self, batch, batch_idx):
        is_large = self.trainer.optimizers[0].param_groups[0]["lr"] > 1
        return self.loss(batch) * (INF if is_large else 1.0)

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=self.lr)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_search_for_the_learning_rate_may_overflow(make_trainer):
    plugin = plugin_for(max_consecutive_overflows=3)
    trainer = make_trainer(plugins=[plugin], max_epochs=1, limit_val_batches=0)
    model = Diverges([1.0] * 40)
    Tuner(trainer).lr_find(model, max_lr=100, num_training=30, early_stop_threshold=None, update_attr=False)
    assert plugin.overflow_steps == 0
    trainer.fit(model)
    assert trainer.precision == "16-mixed"
    assert plugin.scaler.get_scale() == 1024


def test_a_disabled_scaler_leaves_nothing_in_a_checkpoint(train, tmp_path):
    plugin = LeanMixedPrecision("fp16", scaler=torch.amp.GradScaler("cpu", enabled=False))
    train(Scripted([1.0]), plugin).trainer.save_checkpoint(tmp_path / "disabled.ckpt")
    assert "MixedPrecision" not in torch.load(tmp_path / "disabled.ckpt")
    resumed = LeanMixedPrecision("fp16")
    train(Scripted([1.0]), resumed, max_epochs=2, ckpt_path=tmp_path / "disabled.ckpt")
    assert resumed.scaler.get_scale() == 65536


class InfOnRankOne(LitTiny):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * INF if self.global_rank == 1 and batch_idx == 1 else loss

    def on_train_end(self):
        plugin, path = self.trainer.precision_plugin, self.trainer.default_root_dir
        weights = list(map(torch.detach, self.parameters()))
        torch.save((plugin.overflow_steps, plugin.scaler.get_scale(), weights), f"{path}/{self.global_rank}.pt")


@pytest.mark.distributed
def test_an_inf_on_one_rank_is_skipped_by_both(train, tmp_path):
    train(InfOnRankOne(TinyCNN()), strategy="ddp_fork", devices=2)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert one[:2] == other[:2] == (1, 512.0)
    assert all(map(torch.equal, one[2], other[2]))


class Inner(Scripted):
    def on_train_epoch_end(self):
        other = pl.Trainer(accelerator="cpu", logger=False, plugins=[self.trainer.precision_plugin], barebones=True)
        other.fit(Scripted([1.0]))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_inside_of_another_needs_a_plugin_of_its_own(train):
    with pytest.raises(MisconfigurationException, match="belongs to a trainer that is running"):
        train(Inner([1.0]))
