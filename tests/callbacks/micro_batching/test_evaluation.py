"""Validation, test and prediction steps in parts: outputs, metrics and logged values of the whole batch."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from support.memory_limit import MemoryLimit
from support.micro_batching_models import HeavyLayer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_vram import MicroBatching
from lightning_vram.memory.units import MIB

NUM_SAMPLES = 14  # two batches: eight and six


class LitEvaluated(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        pl.seed_everything(0, verbose=False)
        self.net = nn.Sequential(nn.Linear(5, 7), HeavyLayer("forward"), nn.Tanh(), nn.Linear(7, 3)).double()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.area = torchmetrics.classification.MulticlassAUROC(3)
        self.sizes: list[int] = []
        self.outputs: list[Any] = []

    def step(self, batch: list[Tensor], name: str) -> dict[str, Any]:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.sizes.append(len(x))
        self.accuracy(logits, y)
        self.area.update(logits.softmax(-1), y)
        self.log(f"{name}_loss", loss)
        self.log(f"{name}_most", logits.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log(f"{name}_accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log(f"{name}_area", self.area)
        return {"loss": loss, "logits": logits, "names": [f"{int(label)}" for label in y], "stage": name}

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        return self.step(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        return self.step(batch, "test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.sizes.append(len(batch[0]))
        return {"logits": self.net(batch[0])}

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs)

    on_test_batch_end = on_validation_batch_end

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(x, torch.randint(3, (NUM_SAMPLES,), generator=generator)), batch_size=8)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


Run = Callable[..., tuple[LitEvaluated, dict[str, float], Any]]


@pytest.fixture
def run(make_trainer: Callable[..., pl.Trainer]) -> Run:
    def evaluate(stage: str, *callbacks: pl.Callback, limit: MemoryLimit | None = None, **options: Any) -> Any:
        model = LitEvaluated()
        trainer = make_trainer(callbacks=list(callbacks), max_epochs=1, **options)
        with limit or MemoryLimit():
            returned = getattr(trainer, stage)(model, **({} if stage in ("fit", "predict") else {"verbose": False}))
        return model, {key: float(value) for key, value in trainer.callback_metrics.items()}, returned

    return evaluate


def assert_close(one: Any, other: Any) -> None:
    if isinstance(other, Tensor):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    elif isinstance(other, dict):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert_close(one[key], value)
    else:
        assert one == other


@pytest.mark.parametrize(("stage", "size"), [("validate", 3), ("test", "auto"), ("fit", "auto")])
def test_parts_give_outputs_metrics_and_logged_values_of_the_whole_batch(run: Run, stage: str, size: Any) -> None:
    plain, metrics, returned = run(stage)
    limit = MemoryLimit(int(3.5 * MIB)) if size == "auto" else None
    training = "auto" if size == "auto" else 8
    split, split_metrics, split_returned = run(stage, MicroBatching(training, eval=size), limit=limit)
    assert max(split.sizes) <= (4 if size == "auto" else size)
    for one, other in zip(split.outputs, plain.outputs, strict=True):
        assert_close(one, other)
    assert split_metrics == pytest.approx(metrics, abs=1e-6)
    if stage != "fit":
        for one, other in zip(split_returned, returned, strict=True):
            assert one == pytest.approx(other, abs=1e-6)


def test_predictions_are_put_together(run: Run) -> None:
    _, _, expected = run("predict")
    model, _, predictions = run("predict", MicroBatching(eval=3))
    assert model.sizes == [3, 3, 2, 3, 3]
    for one, other in zip(predictions, expected, strict=True):
        assert_close(one, other)


def test_without_eval_the_steps_are_left_alone(run: Run) -> None:
    model, _, _ = run("validate", MicroBatching(2))
    assert model.sizes == [8, 6]


def test_the_module_may_combine_outputs_itself(make_trainer: Callable[..., pl.Trainer]) -> None:
    class Counting(LitEvaluated):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> int:
            return int(batch[1].sum())

        def combine_outputs(self, outputs: list[int], sizes: list[int]) -> int:
            assert sum(sizes) in (8, 6)
            return sum(outputs)

    expected = make_trainer().predict(Counting())
    assert make_trainer(callbacks=[MicroBatching(eval=3)]).predict(Counting()) == expected


def test_a_loader_of_several_is_split_too(make_trainer: Callable[..., pl.Trainer]) -> None:
    metrics = []
    for callbacks in ([], [MicroBatching(eval=3)]):
        trainer, model = make_trainer(callbacks=callbacks), LitEvaluated()
        trainer.validate(model, [model.val_dataloader(), model.val_dataloader()], verbose=False)
        metrics.append({key: float(value) for key, value in trainer.callback_metrics.items()})
    assert metrics[1] == pytest.approx(metrics[0], abs=1e-6)
    assert any(key.endswith("/dataloader_idx_1") for key in metrics[0])
