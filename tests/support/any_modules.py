"""LightningModules of all sorts: what a step may do, besides having a network. Each with a batch and its trainer."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import WeightAveraging
from support.helpers import NUM_CLASSES, LitManual, LitTiny, TinyCNN, TinyGPT
from support.written_nets import WAYS, Averaged
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BatchEncoding

WIDTH = 16


def images(size: int) -> list[Tensor]:
    return [torch.randn(size, 3, 8, 8), torch.randint(NUM_CLASSES, (size,))]


def tokens(size: int) -> list[Tensor]:
    return [torch.randint(17, (size, 11)), torch.randint(17, (size, 11))]


def rows(size: int) -> Tensor:
    return torch.randn(size, WIDTH)


class Plain(pl.LightningModule):
    """Some layers on rows: what the others add to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return Plain.training_step(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Adversarial(Plain):
    """A generator and a discriminator, stepped by hand, one frozen while the other learns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(WIDTH, 32), nn.LeakyReLU(), nn.Linear(32, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator, judge = self.optimizers()
        noise = torch.randn_like(batch)
        self.toggle_optimizer(generator)
        loss = F.softplus(-self.judge(self.net(noise))).mean()
        self.manual_backward(loss)
        self.clip_gradients(generator, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(judge)
        made = self.net(noise).detach()
        self.manual_backward((F.softplus(self.judge(made)) + F.softplus(-self.judge(batch))).mean())
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)
        self.log_dict({"g": loss}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters()), torch.optim.Adam(self.judge.parameters())], []


class Metered(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(WIDTH)
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        outputs = self.net(batch)
        self.accuracy(outputs, batch.argmax(1))
        self.error.update(outputs, batch)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.log("error", self.error)
        loss = outputs.square().mean()
        self.log_dict({"a": loss, "b": 2.0}, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.accuracy(self.net(batch), batch.argmax(1))
        self.log("val_accuracy", self.accuracy)


class Sparse(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, WIDTH, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.table(batch).square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.table.parameters()))


class Skipping(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


class Nested(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(_rows_in(batch), batch_idx)

    validation_step = training_step


def _rows_in(batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, dict | BatchEncoding):
        return _rows_in(batch["rows"])
    return torch.stack([_rows_in(part) for part in batch])


class Penalised(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = batch.requires_grad_()
        loss = self.net(batch).square().mean()
        (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
        return loss + slope.square().sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()


class Late(Plain):
    """Its buffers and layers are made when the trainer is there; it checks what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Linear(WIDTH, WIDTH)
            self.net.weight.register_hook(lambda gradient: gradient * 0.5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) * self.scale).square().mean()
        if torch.isnan(loss) or not torch.isfinite(loss).all():
            raise ValueError("diverged")
        return loss

    validation_step = training_step


class Averaging(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return True


def _tied() -> pl.LightningModule:
    net = TinyGPT()
    net.head.weight = net.embed.weight
    return LitTiny(net)


Case = tuple[Callable[[], pl.LightningModule], Callable[[int], Any], dict[str, Any]]
MODULES: dict[str, Case] = {
    "cnn": (lambda: LitTiny(TinyCNN()), images, {}),
    "gpt": (lambda: LitTiny(TinyGPT()), tokens, {}),
    "tied": (_tied, tokens, {}),
    "late with hooks": (Late, rows, {}),
    "manual": (lambda: LitManual(TinyCNN()), images, {}),
    "gan": (Adversarial, rows, {}),
    "metrics": (Metered, rows, {}),
    "sparse": (Sparse, lambda size: torch.randint(512, (size, 3)), {}),
    "skipping": (Skipping, rows, {}),
    "penalised": (Penalised, rows, {}),
    "list of samples": (Nested, lambda size: [{"rows": torch.randn(WIDTH), "id": i} for i in range(size)], {}),
    "batch encoding": (Nested, lambda size: BatchEncoding({"rows": rows(size)}), {}),
    "average of weights": (Plain, rows, {"callbacks": [Averaging()]}),
    "own average": (lambda: Averaged("end of the batch", WAYS["data ="]), tokens, {}),
    "clipped gradients": (Plain, rows, {"gradient_clip_val": 1.0}),
    "accumulated": (Plain, rows, {"accumulate_grad_batches": 3}),
    "bf16": (Plain, rows, {"precision": "bf16-mixed"}),
}
