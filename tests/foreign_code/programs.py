"""Training code as people write it who have never heard of this package: one LightningModule per kind of it.

Every optimizer is fused, as ``fsdp_offload`` steps: the kernels of ``foreach`` round otherwise.
"""

import copy
import math
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

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(self.norm(hidden))


class MomentumTeacher(pl.LightningModule):
    """Self-supervised: a student predicts what its own moving average makes of another view."""

    def __init__(self, moves: str = "after the batch") -> None:
        super().__init__()
        self.moves = moves
        self.student = nn.Sequential(nn.Linear(8, WIDTH), Residual(), Residual())
        self.teacher = copy.deepcopy(self.student)
        for parameter in self.teacher.parameters():
            parameter.requires_grad = False
        self.predictor = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        if self.moves == "in the step":
            for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                teacher.data = teacher.data * 0.9 + student.data * 0.1
        (view,) = batch
        predicted = self.predictor(self.student(view))
        with torch.no_grad():
            expected = self.teacher(view.flip(1))
        loss = -F.cosine_similarity(predicted, expected, dim=-1).mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if self.moves == "after the batch":
                with torch.no_grad():
                    teacher.mul_(0.9).add_(student, alpha=0.1)
            elif self.moves == "through data":
                teacher.data.mul_(0.9).add_(student.data, alpha=0.1)

    def configure_optimizers(self) -> AdamW:
        return adamw([*self.student.parameters(), *self.predictor.parameters()])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(NUM_SAMPLES, 8)), batch_size=BATCH_SIZE, shuffle=True)


class MomentumTeacherInTheStep(MomentumTeacher):
    def __init__(self) -> None:
        super().__init__("in the step")


class MomentumTeacherThroughData(MomentumTeacher):
    def __init__(self) -> None:
        super().__init__("through data")


class Adversarial(pl.LightningModule):
    """A generator and a discriminator take turns, each with its optimizer, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), Residual(), Residual(), nn.Linear(WIDTH, 8), nn.Tanh())
        self.discriminator = nn.Sequential(
            nn.Linear(8, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.3), Residual(), Residual(), nn.Linear(WIDTH, 1)
        )

    def judge(self, samples: Tensor, *, is_real: bool) -> Tensor:
        logits = self.discriminator(samples)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        (real,) = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()
        noise = torch.randn(len(real), 4, device=self.device)

        self.toggle_optimizer(generator_optimizer)
        loss = self.judge(self.generator(noise), is_real=True)
        generator_optimizer.zero_grad()
        self.manual_backward(loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)
        self.log("generator_loss", loss, prog_bar=True)

        self.toggle_optimizer(discriminator_optimizer)
        loss = (self.judge(real, is_real=True) + self.judge(self.generator(noise).detach(), is_real=False)) / 2
        discriminator_optimizer.zero_grad()
        self.manual_backward(loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)
        self.log("discriminator_loss", loss, prog_bar=True)

    def configure_optimizers(self) -> list[AdamW]:
        return [adamw(self.generator.parameters()), adamw(self.discriminator.parameters())]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.rand(NUM_SAMPLES, 8) * 2 - 1), batch_size=BATCH_SIZE, shuffle=True)


class LowRank(nn.Module):
    """A frozen linear layer, and beside it two small ones that learn what to add."""

    def __init__(self, base: nn.Linear, rank: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2.0


class Adapters(pl.LightningModule):
    """Fine-tunes adapters in a frozen language model; only they go to the optimizer and into checkpoints."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Residual(dropout=dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.requires_grad_(requires_grad=False)
        for block in self.blocks:
            block.mlp[0] = LowRank(block.mlp[0], dropout=dropout)
            block.mlp[3] = LowRank(block.mlp[3], dropout=dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"])[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = adamw((parameter for parameter in self.parameters() if parameter.requires_grad), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        names = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in names}

    def train_dataloader(self) -> DataLoader:
        samples = [{"input_ids": tokens} for tokens in torch.randint(32, (NUM_SAMPLES, 9))]
        return DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True)


class AdaptersWithDropout(Adapters):
    def __init__(self) -> None:
        super().__init__(dropout=0.2)


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

    predict_dataloader = train_dataloader


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


class TimedBlock(nn.Module):
    """A stage of a U-Net that is told how noisy its input is."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(8, channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x + self.conv(F.silu(self.norm(x + self.time(time)[:, :, None, None])))


class Diffusion(pl.LightningModule):
    """Learns to tell the noise in noisy images, and makes images of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
        self.blocks = nn.ModuleList(TimedBlock(8) for _ in range(3))
        self.register_buffer("signal", torch.linspace(0.999, 0.01, 10))

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(100) * torch.arange(4, device=x.device) / 4)
        angles = steps[:, None] * frequencies
        time = torch.cat([angles.sin(), angles.cos()], dim=1)
        hidden = skip = self.first(x)
        for block in self.blocks:
            hidden = block(hidden, time)
        return self.last(torch.cat([hidden, skip], dim=1))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        (images,) = batch
        noise = torch.randn_like(images)
        steps = torch.randint(len(self.signal), (len(images),), device=self.device)
        signal = self.signal[steps][:, None, None, None]
        loss = F.mse_loss(self(signal.sqrt() * images + (1 - signal).sqrt() * noise, steps), noise)
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images = torch.randn_like(batch[0])
        for step in reversed(range(len(self.signal))):
            noise = self(images, torch.full((len(images),), step, device=self.device))
            images = images - 0.1 * noise + 0.01 * torch.randn_like(images)
        return images

    def configure_optimizers(self) -> AdamW:
        return adamw(self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(NUM_SAMPLES, 1, 8, 8)), batch_size=BATCH_SIZE, shuffle=True)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.zeros(6, 1, 8, 8)), batch_size=BATCH_SIZE)


class Speech(pl.LightningModule):
    """Reads letters off sequences of several lengths; nobody says which frame belongs to which letter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, WIDTH), Residual(), Residual())
        self.recurrent = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        frames, num_frames, letters, num_letters = batch
        packed = nn.utils.rnn.pack_padded_sequence(
            self.encoder(frames), num_frames.cpu(), batch_first=True, enforce_sorted=False
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        log_probabilities = self.head(hidden).log_softmax(dim=-1).transpose(0, 1)
        loss = F.ctc_loss(log_probabilities, letters, num_frames, num_letters, zero_infinity=True)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> AdamW:
        return adamw(self.parameters())

    def train_dataloader(self) -> DataLoader:
        num_frames, num_letters = torch.randint(8, 13, (NUM_SAMPLES,)), torch.randint(1, 4, (NUM_SAMPLES,))
        letters = torch.randint(1, NUM_CLASSES, (NUM_SAMPLES, 3))
        data = TensorDataset(torch.randn(NUM_SAMPLES, 12, 6), num_frames, letters, num_letters)
        return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)


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

    predict_dataloader = val_dataloader
