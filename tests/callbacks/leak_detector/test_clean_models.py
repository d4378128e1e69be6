"""Memory that is new, large or uneven, and no leak: nothing is reported."""

import copy
import warnings

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EMAWeightAveraging
from support import leaky_models as leaky
from torch import nn
from torch.utils.data import DataLoader

from lightning_vram.callbacks.leak_detector import LeakDetector
from lightning_vram.memory.leaks import LiveBytes

WIDTH, NUM_BATCHES, NUM_EPOCHS = leaky.WIDTH, 8, 6  # 8 KiB in each result of a layer
DETECTOR = {"patience": 5, "min_bytes_per_step": 1024}


def rows(*, varies, num_batches=NUM_BATCHES):
    """Batches of 8 rows, or of any number up to that."""
    sizes = [1 + (number * 5) % 8 if varies else 8 for number in range(num_batches)]
    return DataLoader([torch.randn(size, WIDTH) for size in sizes], batch_size=None)


class Clean(leaky.Plain):
    """Trained and evaluated with what is logged."""

    varies = False

    def validation_step(self, batch, batch_idx):
        self.seen = self.loss(batch)
        if not self.trainer.predicting:  # which logs nothing
            self.log("val", self.loss(batch))

    test_step = predict_step = lambda self, batch, batch_idx: self.validation_step(batch, batch_idx)

    def train_dataloader(self):
        return rows(varies=self.varies)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class VariableLengths(Clean):
    varies = True


class ListMetric(Clean):
    """Its states grow until Lightning resets them, at the end of the epoch."""

    def __init__(self):
        super().__init__()
        self.metric = torchmetrics.MeanMetric()
        self.scores = torchmetrics.CatMetric()
        self.val_scores = torchmetrics.CatMetric()

    def training_step(self, batch, batch_idx):
        self.scores.update(self.net[0](batch).detach().flatten())
        self.metric(batch)
        self.log("mean", self.metric)
        return self.loss(batch)

    def on_train_epoch_end(self):
        self.scores.reset()

    def validation_step(self, batch, batch_idx):
        self.val_scores.update(self.net[0](batch).flatten())

    def on_validation_epoch_end(self):
        self.log("scores", self.val_scores.compute().mean())
        self.val_scores.reset()


class CollectedOutputs(Clean):
    """What Lightning's documentation shows for the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        self.outputs.append(self.net[0](batch).detach())
        return self.loss(batch)

    def on_train_epoch_end(self):
        self.outputs.clear()

    def validation_step(self, batch, batch_idx):
        self.outputs.append({"hidden": self.net[0](batch)})

    def on_validation_epoch_end(self):
        self.outputs.clear()


class JoinedOutputs(Clean):
    """One tensor for the whole epoch, made anew in each step; a validation begins it anew, too."""

    def __init__(self):
        super().__init__()
        self.all = torch.zeros(0)

    def training_step(self, batch, batch_idx):
        self.all = torch.cat([self.all, self.net[0](batch).detach().flatten()])
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.all = torch.cat([self.all, self.net[0](batch).flatten()])

    def on_train_epoch_start(self):
        self.all = torch.zeros(0)

    on_validation_epoch_start = on_train_epoch_start
    test_step = predict_step = validation_step


class Manual(Clean):
    """Its optimizers take turns, so that gradients differ from batch to batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.net[0].parameters()), torch.optim.Adam(self.net[2].parameters())]


class LateLayers(Clean):
    """Others train in each epoch, so that gradients and states come bit by bit."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EPOCHS))

    def training_step(self, batch, batch_idx):
        for part in self.parts[: self.current_epoch + 1]:
            batch = part(batch)
        return self.loss(batch)


MODELS = [*(Clean, VariableLengths, ListMetric, CollectedOutputs, Manual, LateLayers, JoinedOutputs)]


@pytest.fixture(params=["counted", "looked at always"])
def counting(request, monkeypatch):
    """Steps are looked at where memory grows; or again and again, as on a machine that does not count."""
    if request.param != "counted":
        monkeypatch.setattr(LiveBytes, "read", lambda self: {})


def fit(model, make_trainer, **arguments):
    detector = LeakDetector(**DETECTOR)
    callbacks = [detector, *arguments.pop("callbacks", [])]
    trainer = make_trainer(callbacks=callbacks, max_epochs=NUM_EPOCHS, log_every_n_steps=1, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of Lightning: workers, deterministic kernels
        trainer.fit(model)
    return [str(leak) for _, leak in detector.leaks]


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_reported(model, make_trainer, counting):
    assert fit(model(), make_trainer) == []


@pytest.mark.quick_sample(1)
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("model", [VariableLengths, CollectedOutputs, JoinedOutputs])
def test_nothing_is_reported_of_an_evaluation(stage, model, make_trainer, counting):
    detector = LeakDetector(**DETECTOR)
    trainer = make_trainer(callbacks=[detector])
    batches = rows(varies=model.varies, num_batches=40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        getattr(trainer, stage)(model(), batches)
    assert detector.leaks == []


@pytest.mark.quick_sample(1)
@pytest.mark.parametrize(
    "arguments",
    [
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"callbacks": [EMAWeightAveraging()]},
        {"val_check_interval": 3},
    ],
    ids=["accumulation", "autocast", "weight averaging", "validation within an epoch"],
)
def test_nothing_is_reported_with(arguments, make_trainer, counting):
    assert fit(CollectedOutputs() if "precision" in arguments else Clean(), make_trainer, **copy.copy(arguments)) == []
