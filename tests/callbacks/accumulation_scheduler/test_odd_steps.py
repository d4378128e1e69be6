"""AccumulationScheduler: steps that have no loss, count for nothing, or go another way than Lightning's."""

import copy
import warnings
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.accumulation_models import Ragged, Scalar, fit_once, mean_gradient, ragged_batches
from torch import nn
from torch.utils.data import DataLoader

from lightning_vram.callbacks.accumulation_scheduler.callback import AccumulationScheduler
from lightning_vram.callbacks.micro_batching.callback import MicroBatching

TOLERANCE = 1e-12


@pytest.fixture
def fit(make_trainer):
    return partial(fit_once, make_trainer)


def warnings_of(fit, *arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(*arguments)
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "AccumulationScheduler" in text]


class Holes(Scalar):
    def train_dataloader(self):
        return DataLoader(self.values, collate_fn=lambda values: None if values[0] == 2 else torch.stack(values))


def test_whether_a_window_ends_can_be_asked_before_the_first_batch(fit):
    class Asks(Scalar):
        def on_train_epoch_start(self):  # as SlurmRequeue does on a signal
            self.trainer.fit_loop._should_accumulate()

    fit(Asks(range(1, 8)), AccumulationScheduler({0: 3}))


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_a_batch_that_is_not_there_is_refused(fit):
    with pytest.raises(MisconfigurationException) as caught:
        fit(Holes(range(1, 8)), AccumulationScheduler({0: 3}))
    assert str(caught.value) == (
        "AccumulationScheduler does not work with a batch that is None: ranks would not step together. Leave such "
        "samples out in the dataset, or let training_step return None."
    )


class LossOnlySometimes(Scalar):
    def training_step(self, batch, batch_idx):
        return None if batch.item() >= 4 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_scaler_steps_when_the_last_step_of_a_window_has_no_loss(fit):
    """Lightning leaves the window out, and shows hooks gradients times the scale."""
    model = LossOnlySometimes([1, 2, 4]).float()
    model.values = model.values.float()
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    fit(model, AccumulationScheduler({0: 3}), plugins=[plugin])
    assert model.gradients == [1.5]
    assert model.weight.item() == pytest.approx(-0.15)


class MaskedMean(Ragged):
    """0 / 0, also in its backward, where nothing is labelled."""

    def loss(self, batch):
        inputs, mask = batch["inputs"].to(self.net.weight.dtype), batch["labels"] != -100
        outputs = self.net(inputs)[..., 0]
        return ((outputs - batch["labels"]) ** 2 * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("empty", "others"), [(0, []), (2, []), (1, [MicroBatching(2, weight="tokens")])], ids=["first", "last", "split"]
)
def test_a_mean_over_no_tokens_is_left_out_wherever_it_is_in_the_window(fit, empty, others):
    batches = ragged_batches(3)
    batches[empty]["labels"].fill_(-100)
    model = MaskedMean(batches, "tokens")
    expected = mean_gradient(copy.deepcopy(model), batches)
    fit(model, AccumulationScheduler({0: 3}, weight="tokens"), *copy.deepcopy(others))
    assert torch.allclose(model.gradients[0], expected, rtol=0, atol=TOLERANCE)


def test_a_window_without_any_token_leaves_the_weights_alone(fit):
    batches = ragged_batches(2)
    for batch in batches:
        batch["labels"].fill_(-100)
    model = MaskedMean(batches, "tokens")
    model.on_before_optimizer_step = lambda optimizer: None
    before = copy.deepcopy(model.net.state_dict())
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    fit(model.float(), AccumulationScheduler({0: 2}, weight="tokens"), plugins=[plugin])
    assert all(torch.equal(tensor, before[name].float()) for name, tensor in model.net.state_dict().items())


def test_losses_are_in_units_of_the_first_weight_that_is_not_zero(fit):
    """Or a float16 backward of 4096 tokens is infinite. The unit is the next power of two."""
    losses = []
    model = Scalar([0, 4096, 4096, 4096])
    model.weight.data.fill_(1e-3)
    model.on_before_backward = lambda loss: losses.append(loss.item())
    fit(model, AccumulationScheduler({0: 4}, weight=lambda batch: batch))
    assert losses == pytest.approx([1e-3 * 4096 / 4 / 2] * 3)


class TwoParts(pl.LightningModule):
    """Trains its head; the gradient of its backbone is there and nobody zeroes it."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = (nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2))
        self.gradients = []

    def training_step(self, batch, batch_idx):
        return (self.backbone + self.head) * batch.mean()

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append((self.backbone.grad.item(), self.head.grad.item()))

    def configure_optimizers(self):
        return torch.optim.SGD([self.head], lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.arange(1.0, 7.0, dtype=torch.float64))


def test_only_what_is_zeroed_is_multiplied(fit):
    model = TwoParts()
    fit(model, AccumulationScheduler({0: 4}))
    assert model.gradients == [(2.5, 2.5), (2.5 + 5.5, 5.5)]
    weighted = TwoParts()
    fit(weighted, AccumulationScheduler({0: 2}, weight=lambda batch: 4096.0 if batch == 1 else 1.0))
    assert weighted.gradients[-1][0] == pytest.approx((1 + (2 + 3 + 4 + 5 + 6) / 4096) / 2 / 2)


class Bypassing(Scalar):
    """The strategy, and so hooks and clipping."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.optimizer.step(closure=optimizer_closure)
        self.gradients.append(self.weight.grad.item())


def test_gradients_of_a_step_past_the_strategy_are_right(fit):
    model = Bypassing([1, 2, 3, 4, 5])
    fit(model, AccumulationScheduler({0: 2}, weight=lambda batch: batch))
    assert model.gradients == pytest.approx([(1 + 4) / 3, (9 + 16) / 7, 5], abs=TOLERANCE)


class SharpnessAware(Scalar):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        optimizer_closure()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:AccumulationScheduler accumulates gradients, so SharpnessAware.optimizer_step")
def test_a_closure_that_is_called_again_is_refused_within_a_window(fit):
    with pytest.raises(MisconfigurationException) as caught:
        fit(SharpnessAware(range(4)), AccumulationScheduler({0: 2}))
    assert str(caught.value) == (
        "AccumulationScheduler does not work with an optimizer_step that calls its closure several times per "
        "step, such as sharpness-aware minimization (SAM): each call would run the last micro-batch only. "
        "Use larger batches or an optimizer that calls it once."
    )


class Graphs(Scalar):
    """Edges belong to no sample; it says itself how batches are cut."""

    def training_step(self, batch, batch_idx):
        return self.weight * batch["x"].mean()

    def split_batch(self, batch, size):
        return [{"x": part, "edges": batch["edges"]} for part in batch["x"].split(size)]

    def train_dataloader(self):
        sizes = (3, 1)
        return DataLoader(
            [{"x": torch.full((s,), float(s)).double(), "edges": torch.zeros(2, 9)} for s in sizes], batch_size=None
        )


def test_samples_are_counted_by_the_split_batch_of_the_module(fit):
    model = Graphs([1])
    fit(model, AccumulationScheduler({0: 2}, weight="samples"))
    assert model.gradients == [(3 * 3 + 1 * 1) / 4]


def test_weights_that_differ_from_those_of_micro_batches_are_told(fit):
    model = Ragged(ragged_batches(2), "tokens")

    def told(weight, factor, part_weight):
        return warnings_of(
            fit,
            copy.deepcopy(model),
            AccumulationScheduler({0: factor}, weight=weight),
            MicroBatching(8, weight=part_weight),
        )

    (text,) = told("tokens", 2, "samples")
    assert text == (
        "AccumulationScheduler(weight='tokens') and MicroBatching(weight='samples') weigh their "
        "micro-batches differently, so that an optimizer step is not the mean over its samples or tokens. "
        "Give both the same weight."
    )
    assert told(None, 2, "samples") == told("tokens", 2, "tokens") == told(None, 1, "tokens") == []
