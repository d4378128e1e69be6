"""AccumulationScheduler: every optimizer step has the gradient of one big batch, and nothing is left behind."""

import copy
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from support.accumulation_models import Ragged, Scalar, Streaming, fit_once, mean_gradient, ragged_batches, windows_of
from support.helpers import assert_equal_weights, fail_in
from torch.utils.data import DataLoader

from lightning_vram.callbacks.accumulation_scheduler.callback import AccumulationScheduler
from lightning_vram.callbacks.micro_batching.callback import MicroBatching

TOLERANCE = 1e-12


@pytest.fixture
def fit(make_trainer):
    return partial(fit_once, make_trainer)


@pytest.mark.parametrize(
    ("model", "limit", "gradients"),
    [
        (Scalar(range(1, 11)), None, [2.5, 6.5, 9.5]),  # Lightning divides the last two by four, 4.75 (#19987, #21808)
        (Scalar(range(1, 11)), 6, [2.5, 5.5]),
        (Streaming(range(1, 8)), None, [2.5, 6]),
    ],
    ids=["whole", "limit", "stream"],
)
def test_last_window_is_the_mean_over_what_it_holds(model, limit, gradients, fit):
    fit(model, AccumulationScheduler({0: 4}), limit_train_batches=limit)
    assert model.gradients == gradients
    assert model.zeroed_at == [4 * number for number in range(len(gradients))]


def test_no_gradient_of_an_old_window_is_in_a_new_one(fit):
    """Lightning, told 4 after the sixth batch, steps with (5 + 6)/2 + (7 + 8)/4 = 9.25."""
    model = Scalar(range(1, 9))
    fit(model, AccumulationScheduler(by_step={0: 2, 3: 4}))
    assert model.gradients == [1.5, 3.5, 5.5, 7.5]
    assert model.zeroed_at == [0, 2, 4, 6]


FACTORS = st.dictionaries(st.integers(0, 6), st.integers(1, 5), min_size=1, max_size=3).map(
    lambda factors: dict(sorted(factors.items()))
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_batches=st.integers(1, 9),
    factors=FACTORS,
    unit=st.sampled_from(["by_epoch", "by_step"]),
    weight=st.sampled_from([None, "samples", "tokens", "shifted_tokens"]),
    num_epochs=st.integers(1, 3),
    size=st.none() | st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_gradients_are_those_of_the_big_batch(fit, num_batches, factors, unit, weight, num_epochs, size, seed):
    batches = ragged_batches(num_batches, seed, is_ragged=weight is not None)
    model = Ragged(batches, weight)
    plain = copy.deepcopy(model)
    split = [] if size is None else [MicroBatching(size, weight=weight or "samples")]
    fit(model, AccumulationScheduler(**{unit: factors}, weight=weight), *split, max_epochs=num_epochs)
    optimizer = plain.configure_optimizers()
    expected = []
    for epoch in range(num_epochs):
        for window in windows_of(batches, factors, unit, epoch, len(expected)):
            expected.append(mean_gradient(plain, window))
            optimizer.step()
    assert len(model.gradients) == len(expected)
    for gradient, other in zip(model.gradients, expected, strict=True):
        assert torch.allclose(gradient, other, rtol=0, atol=TOLERANCE)


def test_gradients_under_a_scaler_are_those_of_the_big_batch(fit):
    """In float16 a backward rounds to 2^-11; factors of the window are three and two."""
    batches = ragged_batches(5)
    model = Ragged(batches, "tokens").float()
    plain = copy.deepcopy(model)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    fit(model, AccumulationScheduler({0: 3}, weight="tokens"), plugins=[plugin])
    assert plugin.scaler.get_scale() == 1024
    optimizer = plain.configure_optimizers()
    for gradient, window in zip(model.gradients, (batches[:3], batches[3:]), strict=True):
        expected = mean_gradient(plain, window)
        optimizer.step()
        assert torch.allclose(gradient, expected, rtol=0, atol=2e-3 * expected.abs().max())


def test_any_function_of_the_batch_is_a_weight(fit):
    model = Scalar([3, 5, 7])
    fit(model, AccumulationScheduler({0: 3}, weight=lambda batch: batch - 2))
    assert model.gradients == pytest.approx([(3 * 1 + 5 * 3 + 7 * 5) / 9], abs=TOLERANCE)


def test_weights_that_are_all_zero_make_no_nan(fit):
    model = Scalar([3, 5, 7, 9])
    fit(model, AccumulationScheduler({0: 2}, weight=lambda batch: 0.0 if batch < 6 else 1.0))
    assert model.gradients == [0, 8]


class Skipping(Scalar):
    def training_step(self, batch, batch_idx):
        return None if batch.item() in (2, 7, 8) else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_does_not_count(fit):
    model = Skipping(range(1, 10))
    fit(model, AccumulationScheduler({0: 4}))
    assert model.gradients == [(1 + 3 + 4) / 3, 5.5, 9]


class Scheduled(Scalar):
    """One learning rate for each step there will be."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.estimate = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.estimate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_scheduler_step(self, scheduler, metric):
        super().lr_scheduler_step(scheduler, metric)
        assert scheduler.last_epoch == len(self.gradients)


class CutShort(Scalar):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


def test_an_epoch_that_is_cut_short_leaves_nothing_behind(fit):
    model = CutShort(range(1, 7))
    fit(model, AccumulationScheduler({0: 2}), max_epochs=2)
    assert model.gradients == [1.5, 1.5]
    assert model.zeroed_at == [0, 2, 0, 2]


class Validating(Scalar):
    def validation_step(self, batch, batch_idx):
        assert self.trainer.global_step == len(self.gradients)

    def val_dataloader(self):
        return DataLoader(self.values)


def test_validation_in_the_middle_of_a_window_changes_nothing(fit):
    model = Validating(range(1, 9))
    fit(model, AccumulationScheduler({0: 4}), val_check_interval=1, limit_val_batches=1)
    assert model.gradients == [2.5, 6.5]


class TestSteppingBatches:
    def test_learning_rate_has_one_value_per_step(self, fit):
        """Lightning estimates 16 for these 2 + 8 steps."""
        model = Scheduled(range(8))
        trainer = fit(model, AccumulationScheduler({0: 4, 1: 1}), max_epochs=2)
        assert model.estimate == trainer.global_step == len(model.gradients) == 10

    @pytest.mark.parametrize(
        ("model", "arguments", "expected"),
        [
            (Scalar(range(8)), {"max_epochs": -1, "max_steps": 3}, 3),
            (Streaming(range(8)), {"max_epochs": 2}, -1),
            (Scalar(range(8)), {"max_epochs": 2, "limit_train_batches": 5}, 4),
        ],
        ids=["steps", "stream", "limit"],
    )
    def test_answers_without_epochs_are_those_of_lightning(self, fit, model, arguments, expected):
        answers = []
        model.configure_optimizers = lambda: answers.append(model.trainer.estimated_stepping_batches)
        with pytest.warns(UserWarning, match="configure_optimizers` returned `None`"):
            fit(model, AccumulationScheduler({0: 4}), **arguments)
        assert answers == [expected]


class TestTargetBatchSize:
    @pytest.mark.parametrize(
        ("rounding", "target", "num_steps"), [(None, 6, 2), ("up", 7, 2), ("down", 5, 3), ("up", 1, 6)]
    )
    def test_a_remainder_is_rounded_where_it_is_allowed(self, fit, rounding, target, num_steps):
        model = Scalar(range(12), batch_size=2)
        fit(model, AccumulationScheduler(target_batch_size=target, round=rounding))
        assert len(model.gradients) == num_steps

    def test_factor_follows_a_loader_that_changes(self, fit):
        model = Scalar(range(8), batch_size=1)

        def load():
            return DataLoader(model.values, batch_size=1 + model.trainer.current_epoch)

        model.train_dataloader = load
        fit(model, AccumulationScheduler(target_batch_size=4), max_epochs=2, reload_dataloaders_every_n_epochs=1)
        assert model.gradients == [1.5, 5.5] * 2
        assert model.zeroed_at == [0, 4, 0, 2]


def make_normed(weight=None):
    torch.manual_seed(0)
    model = Ragged(ragged_batches(6, is_ragged=False), weight)
    model.net = torch.nn.Sequential(model.net, torch.nn.BatchNorm1d(5, dtype=torch.float64))
    return model


def make_averaging():
    return StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1, device=None)


@pytest.mark.filterwarnings("ignore:AccumulationScheduler. batch norm normalizes")
def test_stochastic_weight_averaging_runs_beside(fit):
    """It adds an epoch without backward, in which it takes ``accumulate_grad_batches`` for its own ends."""
    ours, theirs = make_normed(), make_normed()
    scheduler = AccumulationScheduler({0: 2}, correct_batch_norm=False)
    assert fit(ours, scheduler, make_averaging(), max_epochs=3).accumulate_grad_batches == 1
    fit(theirs, make_averaging(), max_epochs=3, accumulate_grad_batches=2)
    assert_equal_weights(ours, theirs)


@pytest.mark.filterwarnings("ignore:AccumulationScheduler. batch norm normalizes")
def test_the_epoch_of_stochastic_weight_averaging_scales_nothing_again(fit):
    """Lightning steps once at its end, with the gradients that are still there."""
    model = make_normed("samples")
    fit(model, AccumulationScheduler({0: 2}, weight="samples"), make_averaging(), max_epochs=2)
    assert len(model.gradients) == 7
    assert torch.equal(model.gradients[-1], model.gradients[-2])


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_factor_is_logged_when_it_changes(fit, tmp_path):
    logger, logged = CSVLogger(tmp_path), []
    logger.log_metrics = lambda metrics, step=None: logged.append((metrics.get("vram/accumulate_grad_batches"), step))
    fit(Scalar(range(6)), AccumulationScheduler({0: 4, 1: 2}), max_epochs=3, logger=logger)
    assert [one for one in logged if one[0] is not None] == [(4.0, 0), (2.0, 2)]


@pytest.mark.parametrize("place", [None, "training_step"])
def test_everything_is_put_back_and_a_second_fit_works(fit, make_trainer, place):
    model, callback = Scalar(range(1, 6)), AccumulationScheduler({0: 2})
    trainer = make_trainer(callbacks=[callback], max_epochs=1)
    owners = [trainer, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.automatic_optimization]
    owners.append(trainer.precision_plugin)
    before = [set(vars(owner)) for owner in owners]
    if place is None:
        trainer.fit(model)
    else:
        fail_in(model, place, trainer)
    assert type(trainer) is pl.Trainer
    assert trainer.accumulate_grad_batches == 1
    assert [set(vars(owner)) - known for owner, known in zip(owners, before, strict=True)] == [set()] * 4
    again = Scalar(range(1, 6))
    fit(again, callback)
    assert again.gradients == [1.5, 3.5, 5]
