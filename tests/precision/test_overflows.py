"""float16 on a CPU: each defect of Lightning's plugin, with its number beside ours."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import LitTiny, TinyCNN, assert_equal_weights
from torch import nn
from torch.utils.data import DataLoader

from lightning_vram import LeanMixedPrecision


class Scripted(pl.LightningModule):
    """One weight per optimizer; the gradient is what the batch says."""

    def __init__(self, gradients, **options):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(options.pop("num_weights", 1))])
        self.gradients = torch.tensor(gradients)
        self.options = options
        self.rates = []

    def training_step(self, batch, batch_idx):
        return (batch * self.weights[0]).sum()

    def on_train_batch_end(self, *args):
        if self.lr_schedulers():
            self.rates.append(self.lr_schedulers().get_last_lr()[0])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.weights, lr=1.0, **self.options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self):
        return DataLoader(self.gradients, batch_size=1)


class ManualScripted(Scripted):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], lr=1.0) for weight in self.weights]


def scaler(**options):
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 1000, **options})


def train(model, make_trainer, plugin=None, **options):
    plugin = plugin or LeanMixedPrecision("fp16", scaler=scaler())
    trainer = make_trainer(plugins=[plugin], max_epochs=1, limit_val_batches=0, **options)
    trainer.fit(model)
    return trainer


INF = float("inf")


class ClippedByHand(ManualScripted):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((batch * self.weights[0]).sum())
        self.clip_gradients(optimizer, 0.1)
        optimizer.step()


def test_manual_clipping_sees_unscaled_gradients(make_trainer):
    # Lightning clips what is scaled, and unscales that: the step has norm 0.1 / 1024.
    # https://github.com/Lightning-AI/pytorch-lightning/issues/18089
    model = ClippedByHand([3.0])
    train(model, make_trainer)
    torch.testing.assert_close(model.weights[0].norm(), torch.tensor(0.1))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_fused_optimizers_are_clipped(algorithm, make_trainer):
    # Lightning: RuntimeError, "does not allow for gradient clipping because it performs unscaling internally".
    fitted = []
    for is_fused in (False, True):
        model = Scripted([3.0, 2.0, INF, 1.0], fused=is_fused)
        trainer = train(model, make_trainer, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)
        fitted.append(model)
    torch.testing.assert_close(fitted[0].weights[0], fitted[1].weights[0], rtol=1e-6, atol=0)
    assert trainer.precision_plugin.overflow_steps == 1


GRADIENTS = [INF, 1.0, INF, INF, 1.0, 1.0, INF, 1.0]


@pytest.mark.filterwarnings("ignore:Detected call of")  # where it does not wait
@pytest.mark.parametrize("holds", [True, False])
def test_the_learning_rate_waits_for_steps_that_were_skipped(holds, make_trainer):
    # Lightning steps the schedule 8 times, at 4 steps of the optimizer.
    model = Scripted(GRADIENTS)
    plugin = LeanMixedPrecision("fp16", scaler=scaler(), hold_lr_on_overflow=holds)
    trainer = train(model, make_trainer, plugin)
    num_updates = 4 if holds else 8
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.5**num_updates]
    assert plugin.overflow_steps == 4
    assert plugin.scaler.get_scale() == 1024 / 2**4
    if holds:
        assert torch.equal(model.weights[0], torch.full((4,), -(1 + 0.5 + 0.25 + 0.125)))


class EveryEpoch(Scripted):
    def configure_optimizers(self):
        configuration = super().configure_optimizers()
        configuration["lr_scheduler"]["interval"] = "epoch"
        return configuration


def test_a_schedule_by_epochs_does_not_wait(make_trainer):
    trainer = train(EveryEpoch([1.0, INF]), make_trainer)
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.5]


def test_overflows_are_logged(make_trainer):
    trainer = train(Scripted(GRADIENTS), make_trainer, log_every_n_steps=1)
    assert trainer.logged_metrics["vram/overflow_steps"] == 4
    assert trainer.logged_metrics["vram/loss_scale"] == 64
    assert trainer.callback_metrics["vram/overflow_steps"] == 4


class OneByHand(ManualScripted):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((batch * self.weights[0]).sum())
        optimizer.step()


@pytest.mark.parametrize("module", [Scripted, OneByHand])
def test_too_many_overflows_in_a_row_end_the_run(module, make_trainer):
    plugin = LeanMixedPrecision("fp16", scaler=scaler(), max_consecutive_overflows=3)
    model = module([INF, INF, 1.0, INF, INF, INF, 1.0])
    with pytest.raises(FloatingPointError, match=r"in 3 optimizer steps in a row, down to a loss scale of 32.*fp32_m"):
        train(model, make_trainer, plugin)


@pytest.mark.parametrize("module", [Scripted, OneByHand])
@pytest.mark.parametrize(("target", "precision"), [("bf16", "bf16-mixed"), ("fp32", "32-true")])
def test_a_run_goes_on_in_another_format_where_that_is_asked_for(module, target, precision, make_trainer):
    plugin = LeanMixedPrecision("fp16", scaler=scaler(), max_consecutive_overflows=2, on_overflow_limit=target)
    model = module([1.0, INF, INF, 2.0, 4.0])
    with pytest.warns(UserWarning, match=f"overflowed in 2 optimizer steps in a row. Training continues in {target}"):
        trainer = train(model, make_trainer, plugin)
    assert trainer.precision == precision
    factors = (1, 0.5, 0.25) if module is Scripted else (1, 1, 1)
    assert torch.equal(model.weights[0], torch.full((4,), -(1.0 * factors[0] + 2 * factors[1] + 4 * factors[2])))


def test_a_run_that_went_on_in_another_format_stays_there_when_resumed(make_trainer, tmp_path):
    def make():
        return LeanMixedPrecision("fp16", scaler=scaler(), max_consecutive_overflows=1, on_overflow_limit="bf16")

    path = tmp_path / "last.ckpt"
    with pytest.warns(UserWarning, match="continues in bf16"):
        trainer = train(Scripted([INF, 1.0]), make_trainer, make())
    trainer.save_checkpoint(path)
    trainer = make_trainer(plugins=[make()], max_epochs=2, limit_val_batches=0)
    trainer.fit(Scripted([1.0, 1.0]), ckpt_path=path)
    assert trainer.precision == "bf16-mixed"
    assert trainer.precision_plugin.scaler is None


def test_a_hook_before_the_step_sees_unscaled_gradients_of_a_fused_optimizer(make_trainer):
    seen = []
    model = Scripted([3.0], fused=True)
    model.on_before_optimizer_step = lambda optimizer: seen.append(model.weights[0].grad.clone())
    train(model, make_trainer)
    assert torch.equal(seen[0], torch.full((4,), 3.0))


class Nothing(Scripted):
    def training_step(self, batch, batch_idx):
        return None if batch_idx < 2 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*returned .None.", "ignore:Detected call of")
def test_a_training_step_may_return_none(make_trainer):
    model = Nothing([1.0, 1.0, 2.0])
    train(model, make_trainer)
    assert model.weights[0][0] < 0


class InfOnRankOne(LitTiny):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * INF if self.global_rank == 1 and batch_idx == 1 else loss

    def on_train_end(self):
        plugin = self.trainer.precision_plugin
        torch.save(
            (plugin.overflow_steps, plugin.scaler.get_scale(), self.state_dict()), f"{self.path}/{self.global_rank}.pt"
        )


@pytest.mark.distributed
def test_an_inf_on_one_rank_is_skipped_by_both(make_trainer, tmp_path):
    pl.seed_everything(0, verbose=False)
    model = InfOnRankOne(TinyCNN())
    model.path = tmp_path
    plugin = LeanMixedPrecision("fp16", scaler=scaler())
    make_trainer(plugins=[plugin], strategy="ddp_fork", devices=2, max_epochs=1, limit_val_batches=0).fit(model)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert one[:2] == other[:2] == (1, 512.0)
    for name, tensor in one[2].items():
        if "running" not in name:  # ranks normalise their own batches
            assert torch.equal(tensor, other[2][name]), name
    assert_equal_weights(model, model)


class ManySteps(ManualScripted):
    """As PPO: fifty steps per batch, each of its own backward; the second one overflows."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for index in range(50):
            optimizer.zero_grad()
            factor = INF if index == 1 else 1.0
            self.manual_backward((batch * factor * self.weights[0]).sum())
            optimizer.step()


def test_one_of_many_steps_in_a_training_step_may_overflow(make_trainer):
    model = ManySteps([1.0])
    trainer = train(model, make_trainer)
    assert torch.equal(model.weights[0], torch.full((4,), -49.0))
    assert trainer.precision_plugin.overflow_steps == 1
    assert trainer.precision_plugin.scaler.get_scale() == 512


class UnscaledByHand(ManualScripted):
    """What is done about Lightning's issue 18089 elsewhere."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((batch * self.weights[0]).sum())
        self.trainer.precision_plugin.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        optimizer.step()


def test_gradients_that_were_unscaled_by_hand_are_not_unscaled_again(make_trainer):
    model = UnscaledByHand([3.0, 4.0, 5.0])
    train(model, make_trainer)
    torch.testing.assert_close(model.weights[0], torch.full((4,), -1.5))


class Asks(OneByHand):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.told = [*getattr(self, "told", []), self.trainer.precision_plugin.overflow_steps]


def test_the_user_can_tell_a_step_that_was_skipped(make_trainer):
    model = Asks([1.0, INF, 1.0])
    trainer = train(model, make_trainer)
    assert model.told == [0, 1, 1]
    assert trainer.scaler.get_scale() == 512


class ByHand(ManualScripted):
    """With the scaler alone, as in plain PyTorch."""

    clips = True

    def training_step(self, batch, batch_idx):
        optimizer, scaler = self.optimizers(use_pl_optimizer=False), self.trainer.scaler
        optimizer.zero_grad()
        scaler.scale((batch * self.weights[0]).sum()).backward()
        if self.clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        scaler.step(optimizer)
        scaler.update()


class ByHandUnclipped(ByHand):
    clips = False


@pytest.mark.parametrize(("module", "expected"), [(ByHand, -1.0), (ByHandUnclipped, -7.0)])
def test_steps_by_the_scaler_alone(module, expected, make_trainer):
    model = module([3.0, INF, 4.0])
    trainer = train(model, make_trainer)
    torch.testing.assert_close(model.weights[0], torch.full((4,), expected))
    assert trainer.scaler.get_scale() == 512


class LastIsNone(Scripted):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*returned .None.")
def test_a_window_whose_last_batch_has_no_loss_makes_its_step(make_trainer):
    # Lightning drops the window.
    model = LastIsNone([2.0, 1.0])
    train(model, make_trainer, accumulate_grad_batches=2)
    assert torch.equal(model.weights[0], torch.full((4,), -1.0))


class Looks(Scripted):
    def validation_step(self, batch, batch_idx):
        self.seen = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")

    def val_dataloader(self):
        return DataLoader(torch.ones(1), batch_size=1)


def test_a_run_that_went_on_in_another_format_is_evaluated_in_it(make_trainer, tmp_path):
    plugin = LeanMixedPrecision("fp16", scaler=scaler(), max_consecutive_overflows=1, on_overflow_limit="bf16")
    model = Looks([INF, 1.0])
    with pytest.warns(UserWarning, match="continues in bf16"):
        trainer = train(model, make_trainer, plugin)
    trainer.limit_val_batches = 1.0
    trainer.validate(model, verbose=False)
    assert model.seen == (torch.bfloat16, True)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    state = torch.load(tmp_path / "after.ckpt")["LeanMixedPrecision"]
    assert state["has_fallen_back"]


def test_each_fit_counts_its_own_overflows_in_a_row(make_trainer):
    plugin = LeanMixedPrecision("fp16", scaler=scaler(), max_consecutive_overflows=2)
    with pytest.raises(FloatingPointError, match="in 2 optimizer steps"):
        train(Scripted([INF, INF]), make_trainer, plugin)
    train(Scripted([INF, 1.0]), make_trainer, plugin)
    assert plugin.overflow_steps == 3


def test_a_disabled_scaler_leaves_nothing_in_a_checkpoint(make_trainer, tmp_path):
    plugin = LeanMixedPrecision("fp16", scaler=torch.amp.GradScaler("cpu", enabled=False))
    trainer = train(Scripted([1.0]), make_trainer, plugin)
    trainer.save_checkpoint(tmp_path / "disabled.ckpt")
    checkpoint = torch.load(tmp_path / "disabled.ckpt")
    assert "MixedPrecision" not in checkpoint
    trainer = make_trainer(plugins=[LeanMixedPrecision("fp16")], max_epochs=2, limit_val_batches=0)
    trainer.fit(Scripted([1.0]), ckpt_path=tmp_path / "disabled.ckpt")
    assert trainer.precision_plugin.scaler.get_scale() == 65536


class Diverges(Scripted):
    """Overflows as soon as the learning rate is large."""

    lr = 1e-3

    def training_step(self, batch, batch_idx):
        is_large = self.trainer.optimizers[0].param_groups[0]["lr"] > 1
        return (batch * self.weights[0]).sum() * (INF if is_large else 1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.weights, lr=self.lr)


@pytest.mark.parametrize("action", ["error", "bf16"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_search_for_the_learning_rate_may_overflow(action, make_trainer, tmp_path):
    plugin = LeanMixedPrecision("fp16", scaler=scaler(), max_consecutive_overflows=3, on_overflow_limit=action)
    trainer = make_trainer(plugins=[plugin], max_epochs=1, limit_val_batches=0, enable_checkpointing=False)
    model = Diverges([1.0] * 40)
    Tuner(trainer).lr_find(model, max_lr=100, num_training=30, early_stop_threshold=None, update_attr=False)
    assert plugin.overflow_steps == 0
    trainer.fit(model)
    assert trainer.precision == "16-mixed"
    assert plugin.scaler.get_scale() == 1024


class Inner(Scripted):
    def on_train_epoch_end(self):
        other = pl.Trainer(accelerator="cpu", logger=False, plugins=[self.trainer.precision_plugin], barebones=True)
        other.fit(Scripted([1.0]))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_inside_of_another_needs_a_plugin_of_its_own(make_trainer):
    with pytest.raises(MisconfigurationException, match="belongs to a trainer that is running"):
        train(Inner([1.0]), make_trainer)
