"""A module whose metrics collect lists, and metrics of every shape."""

from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, MulticlassAveragePrecision
from torchmetrics.wrappers import BootStrapper, ClasswiseWrapper, MetricTracker, MinMaxMetric

Use = Literal["update", "log", "forward"]


class Boxes(Metric):
    """As detection metrics do: one item per image, nested, which torchmetrics itself neither moves nor merges."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("boxes", default=[], dist_reduce_fx=None)

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.boxes.append((preds, (target, preds * target)))

    def compute(self) -> Tensor:
        return torch.stack([preds.sum() - both.sum() for preds, (_, both) in self.boxes]).mean()

    def _apply(self, function: Callable[[Tensor], Tensor]) -> nn.Module:
        this = super()._apply(function, exclude_state=("boxes",))
        this.boxes = torch.utils._pytree.tree_map(function, this.boxes)
        return this


class Detections(Metric):
    """The states of torchmetrics' MeanAveragePrecision, which needs torchvision: lists with tensors for each image."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("detection_box", "detection_scores", "groundtruth_box", "groundtruth_labels"):
            self.add_state(name, default=[], dist_reduce_fx=None)

    def update(self, preds: Tensor, target: Tensor) -> None:
        for score, label in zip(preds, target, strict=True):  # images with one box, or two
            self.detection_box.append(torch.stack([score] * 4).repeat(1 + int(label), 1))
            self.detection_scores.append(score.repeat(1 + int(label)))
            self.groundtruth_box.append(torch.stack([score.detach()] * 4)[None])
            self.groundtruth_labels.append(label[None])

    def compute(self) -> Tensor:
        pairs = zip(self.detection_box, self.groundtruth_box, strict=True)
        boxes = torch.stack([(one.mean(0) * other.sum()).sum() for one, other in pairs]).sum()
        return boxes + torch.cat(self.detection_scores).sum() - torch.cat(self.groundtruth_labels).sum()


class Mixed(Metric):
    """What it computes of its list meets its other state, a buffer, and a tensor that it makes where it is."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx="cat")
        self.add_state("total", default=torch.zeros(2), dist_reduce_fx="sum")
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.seen.append(preds)
        self.total += torch.stack([target.sum(), preds.sum()])

    def compute(self) -> Tensor:
        seen = torch.cat(self.seen) if isinstance(self.seen, list) else self.seen
        ones = torch.ones(2, device=self.device)
        return (torch.stack([seen.sum(), seen.max()]) * self.scale + ones) / (self.total + ones)


class ThreeClasses(nn.Module):
    """Makes three classes of two: for metrics of several classes."""

    def __init__(self, metric: Metric | ClasswiseWrapper) -> None:
        super().__init__()
        self.metric = metric

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.metric.update(torch.stack([preds, 1 - preds, preds / 2], dim=1), target + (preds > 0.5).int())

    def compute(self) -> Any:
        return self.metric.compute()

    def reset(self) -> None:
        self.metric.reset()


METRICS: dict[str, Callable[[], Any]] = {
    "auroc": BinaryAUROC,
    "average precision": lambda: ThreeClasses(MulticlassAveragePrecision(3, average=None)),
    "cat": lambda: CatOfPredictions(),
    "nested items": Boxes,
    "detections": Detections,
    "other states": Mixed,
    "collection": lambda: MetricCollection({"auroc": BinaryAUROC(), "ap": BinaryAveragePrecision(), "mixed": Mixed()}),
    "minmax": lambda: MinMaxMetric(BinaryAUROC()),
    "bootstrapper": lambda: BootStrapper(BinaryAUROC(), num_bootstraps=2),
    "classwise": lambda: ThreeClasses(ClasswiseWrapper(MulticlassAveragePrecision(3, average=None))),
    "tracker": lambda: MetricTracker(BinaryAUROC()),
}


class CatOfPredictions(CatMetric):
    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds)

    def compute(self) -> Tensor:
        return torch.as_tensor(super().compute()).sum()


class LitMetrics(pl.LightningModule):
    """Trains a linear layer, and feeds one metric in all stages, of ``num_batches``; training has three.

    ``use`` says whether the metric is updated and computed at the end, or its object is logged, or it is called.
    """

    def __init__(self, make_metric: Callable[[], Any], use: Use = "update", num_batches: int = 5) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.make_metric = make_metric
        self.use = use
        self.num_batches = num_batches
        self.metric: Any = None
        self.train_metric: Any = None
        self.values: list[Any] = []

    def configure_model(self) -> None:
        if self.metric is None:
            self.metric, self.train_metric = self.make_metric(), self.make_metric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.feed(self.train_metric, batch).sum()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.feed(self.metric, batch)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.feed(self.metric, batch)

    def feed(self, metric: Any, batch: list[Tensor]) -> Tensor:
        features, target = batch
        preds = self.net(features).sigmoid().flatten()
        if self.use == "forward":
            self.values.append(metric(preds, target))
        else:
            metric.update(preds, target)
        if self.use == "log":
            self.log(f"metric, training {self.training}", metric, on_step=False, on_epoch=True)
        return preds

    def begin(self, metric: Any) -> None:
        if isinstance(metric, MetricTracker):
            metric.increment()

    def end(self, metric: Any) -> None:
        if self.use != "log":
            self.values.append(metric.compute())
            if not isinstance(metric, MetricTracker):
                metric.reset()

    def on_train_epoch_start(self) -> None:
        self.begin(self.train_metric)

    def on_train_epoch_end(self) -> None:
        self.end(self.train_metric)

    def on_validation_epoch_start(self) -> None:
        self.begin(self.metric)

    def on_validation_epoch_end(self) -> None:
        self.end(self.metric)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def loader(self, num_batches: int | None = None) -> DataLoader:
        num_samples = 4 * (num_batches or self.num_batches)
        generator = torch.Generator().manual_seed(1)
        features = torch.randn(num_samples, 3, generator=generator)
        target = torch.arange(num_samples) % 2
        return DataLoader(TensorDataset(features, target), batch_size=4)

    def train_dataloader(self) -> DataLoader:
        return self.loader(3)

    val_dataloader = test_dataloader = predict_dataloader = loader


def flat(values: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return [leaf.cpu() for leaf in leaves if isinstance(leaf, Tensor)]


def assert_equal_values(one: Any, other: Any, rounding: float = 0.0) -> None:
    """They are as many tensors, equal to the bit, or but for ``rounding``, relative and absolute."""
    ours, theirs = flat(one), flat(other)
    assert theirs
    torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding, equal_nan=True)
