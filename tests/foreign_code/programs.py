"""Training code as people write it who have never heard of this package, with the optimizers of ``fsdp_offload``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset, TensorDataset

NUM_SAMPLES, BATCH_SIZE = 16, 4
WIDTH = 16
NUM_CLASSES = 5


def adamw(parameters: Any, lr: float = 3e-3) -> AdamW:
    return AdamW(parameters, lr=lr, fused=True)


class Residual(nn.Module):
    """Norm, two linear layers and a sum, as in any transformer or MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(self.norm(hidden))


class Scenes(Dataset):
    """Images of several sizes, and the boxes in each: a list of dicts is the custom of the field."""

    def __init__(self) -> None:
        sizes = torch.randint(12, 20, (NUM_SAMPLES, 2)).tolist()
        self.images = [torch.rand(3, *size) for size in sizes]
        counts = torch.randint(1, 4, (NUM_SAMPLES,)).tolist()
        self.targets = [{"boxes": torch.rand(n, 4), "labels": torch.randint(NUM_CLASSES, (n,))} for n in counts]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self.images[index], self.targets[index]


class Detector(nn.Module):
    """Returns losses in training and what it has found otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()) for _ in range(2))
        )
        self.heads = nn.ModuleDict({"boxes": nn.Conv2d(8, 4, 1), "scores": nn.Conv2d(8, NUM_CLASSES, 1)})

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        batch = torch.stack([F.interpolate(image[None], size=(16, 16), mode="bilinear")[0] for image in images])
        features = self.layers(self.stem(batch))
        boxes = self.heads["boxes"](features).flatten(2).transpose(1, 2).sigmoid()
        scores = self.heads["scores"](features).flatten(2).transpose(1, 2)
        if not self.training:
            best = scores.amax(dim=(1, 2))
            return [{"boxes": b, "score": s} for b, s in zip(boxes, best, strict=True)]
        assert targets is not None
        losses = [self.match(*both) for both in zip(boxes, scores, targets, strict=True)]
        box_losses, class_losses = zip(*losses, strict=True)
        return {"box_loss": torch.stack(box_losses).mean(), "class_loss": torch.stack(class_losses).mean()}

    def match(self, boxes: Tensor, scores: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            nearest = torch.cdist(target["boxes"], boxes, p=1).argmin(dim=1)
        return F.l1_loss(boxes[nearest], target["boxes"]), F.cross_entropy(scores[nearest], target["labels"])


class Detection(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Detector()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        losses = self.net(images, targets)
        self.log_dict(losses, batch_size=len(images))
        return sum(losses.values())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, fused=True)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Scenes(), batch_size=BATCH_SIZE, collate_fn=lambda rows: tuple(zip(*rows, strict=True)))

    predict_loader = train_dataloader


@dataclass
class Graphs:
    """Several graphs as one that is not connected."""

    x: Tensor
    edge_index: Tensor
    graph_index: Tensor
    y: Tensor

    def to(self, device: torch.device, **options: Any) -> "Graphs":
        return replace(self, **{name: value.to(device, **options) for name, value in vars(self).items()})


def join_graphs(graphs: list[Graphs]) -> Graphs:
    offsets = torch.tensor([0, *(len(graph.x) for graph in graphs)]).cumsum(0).tolist()
    return Graphs(
        torch.cat([graph.x for graph in graphs]),
        torch.cat([graph.edge_index + offset for graph, offset in zip(graphs, offsets[:-1], strict=True)], dim=1),
        torch.cat([torch.full((len(graph.x),), i) for i, graph in enumerate(graphs)]),
        torch.stack([graph.y for graph in graphs]),
    )


class Convolution(nn.Module):
    """Adds up what the neighbours send."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.message, self.norm = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        messages = self.message(x)[source]
        received = messages.new_zeros(x.shape).index_add_(0, target, messages)
        return F.relu(self.norm(self.own(x) + received))


class GraphClassification(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolution() for _ in range(3))
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, graphs: Graphs) -> Tensor:
        x = graphs.x
        for layer in self.layers:
            x = F.dropout(layer(x, graphs.edge_index), p=0.2, training=self.training)
        num_graphs = len(graphs.y)
        pooled = x.new_zeros(num_graphs, x.shape[1]).index_add_(0, graphs.graph_index, x)
        return self.head(pooled / graphs.graph_index.bincount(minlength=num_graphs)[:, None])

    def training_step(self, batch: Graphs, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch), batch.y)
        self.log("loss", loss, batch_size=len(batch.y))
        return loss

    def configure_optimizers(self) -> AdamW:
        return adamw(self.parameters())

    def train_dataloader(self) -> DataLoader:
        sizes = torch.randint(3, 7, (NUM_SAMPLES,)).tolist()
        graphs = [
            Graphs(torch.randn(n, 8), torch.randint(n, (2, 2 * n)), torch.zeros(n), torch.randint(NUM_CLASSES, ()))
            for n in sizes
        ]
        return DataLoader(graphs, batch_size=BATCH_SIZE, shuffle=True, collate_fn=join_graphs)


class TwoTasks(pl.LightningModule):
    """A class and a number from one trunk, weighed by learned uncertainties, with metrics of both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, WIDTH), Residual(), Residual())
        self.heads = nn.ModuleDict({"class": nn.Linear(WIDTH, NUM_CLASSES), "number": nn.Linear(WIDTH, 1)})
        self.log_variances = nn.Parameter(torch.zeros(2))
        accuracy = torchmetrics.classification.MulticlassAccuracy(NUM_CLASSES)
        f1 = torchmetrics.classification.MulticlassF1Score(NUM_CLASSES)
        metrics = torchmetrics.MetricCollection({"accuracy": accuracy, "f1": f1})
        self.metrics = nn.ModuleDict({f"{stage}_stage": metrics.clone(f"{stage}/") for stage in ("train", "val")})
        self.val_error = torchmetrics.MeanSquaredError()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.heads["class"](hidden), self.heads["number"](hidden).squeeze(1)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, label, number = batch
        logits, predicted = self(x)
        losses = torch.stack([F.cross_entropy(logits, label), F.mse_loss(predicted, number)])
        loss = (losses * torch.exp(-self.log_variances) + self.log_variances).sum()
        self.metrics["train_stage"].update(logits, label)
        self.log_dict(self.metrics["train_stage"], on_step=False, on_epoch=True)
        self.log_dict({"loss": loss, "class_loss": losses[0], "number_loss": losses[1]}, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        x, label, number = batch
        logits, predicted = self(x)
        self.metrics["val_stage"](logits, label)
        self.val_error(predicted, number)
        self.log_dict(self.metrics["val_stage"])
        self.log("val/error", self.val_error)

    def configure_optimizers(self) -> AdamW:
        return adamw(self.parameters())

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(NUM_SAMPLES, 8)
        data = TensorDataset(x, x[:, :NUM_CLASSES].argmax(1), x.sum(1))
        return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        x = torch.randn(6, 8)
        return DataLoader(TensorDataset(x, x[:, :NUM_CLASSES].argmax(1), x.sum(1)), batch_size=BATCH_SIZE)


class Stage(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))


class Images(pl.LightningModule):
    """A convolutional classifier with batch norms, whose learning rate and batch size others may search."""

    def __init__(self, lr: float = 3e-3, batch_size: int = BATCH_SIZE) -> None:
        super().__init__()
        self.lr, self.batch_size = lr, batch_size
        stages = (Stage() for _ in range(3))
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2))
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.net(images))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self(batch[0])
        return {"probabilities": logits.softmax(dim=1), "classes": logits.argmax(dim=1)}

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = adamw(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)}

    def samples(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(3)
        images = torch.randn(NUM_SAMPLES, 1, 8, 8, generator=generator)
        return TensorDataset(images, torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples(), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.samples(), batch_size=self.batch_size)

    predict_loader = val_dataloader
