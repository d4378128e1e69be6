"""A network that runs out of memory where it is told to, and says what each step made of its batch."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_vram import MicroBatching
from lightning_vram.memory.units import MIB
from lightning_vram.techniques.micro_batching import MicroBatchSizes

BATCH = 8
NUM_SAMPLES = 28  # three batches of eight and one of four
WIDTH = 16


class NotesSizes(pl.Callback):
    def __init__(self, micro_batching: MicroBatching) -> None:
        self.sizes: list[int] = []
        self._micro_batching = micro_batching

    def on_train_batch_end(self, *args: Any) -> None:
        size = self._micro_batching.micro_batch_size
        assert size is not None
        self.sizes.append(size)


class _Sizes(MicroBatchSizes):
    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(None, sizes[0])
        self._sizes = iter(sizes)

    def propose(self, *args: Any) -> int:
        return next(self._sizes)


def with_sizes(sizes: Sequence[int]) -> MicroBatching:
    """As ``MicroBatching(size)``, which never runs a batch again, with a size for each training batch."""
    callback = MicroBatching(sizes[0])
    callback._choosers["training"] = _Sizes(sizes)
    return callback


class Heavy(torch.autograd.Function):
    """Does nothing, with a mebibyte of scratch memory per sample in its forward or its backward."""

    @staticmethod
    def forward(ctx, x: Tensor, where: str) -> Tensor:
        ctx.where = where
        if where == "forward":
            torch.zeros(len(x), MIB, dtype=torch.uint8)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.where == "backward":
            torch.zeros(len(gradient), MIB, dtype=torch.uint8)
        return gradient, None


class HeavyLayer(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        return Heavy.apply(x, self.where)


class LitRegression(pl.LightningModule):
    """Logs in all ways there are, and keeps the gradients and logged values of every step."""

    def __init__(self, *, dropout: float = 0.0, norm: bool = False, heavy: str = "nowhere") -> None:
        super().__init__()
        pl.seed_everything(0, verbose=False)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.BatchNorm1d(4 * WIDTH) if norm else nn.Identity(),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(4 * WIDTH, 4 * WIDTH),
            HeavyLayer(heavy),
            nn.Tanh(),
            nn.Linear(4 * WIDTH, 1),
        ).double()
        self.error = torchmetrics.MeanAbsoluteError()
        self.gradients: list[list[Tensor]] = []
        self.logged: list[dict[str, float]] = []
        self.sizes: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        predicted = self.net(batch["x"])
        loss = F.mse_loss(predicted, batch["y"])
        self.sizes.append(len(predicted))
        self.error(predicted, batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("count", float(len(predicted)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest", predicted.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("smallest", predicted.min(), reduce_fx=min, on_step=True, on_epoch=True)
        return {"loss": loss, "predicted": predicted.detach()}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append([full(p.grad) for p in self.parameters()])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["predicted"].shape == batch["y"].shape
        logged = {key: float(value) for key, value in self.trainer.callback_metrics.items()}
        self.logged.append(logged | {"output": outputs["loss"].item()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
        samples = [{"x": row, "y": row.sum(0, keepdim=True)} for row in x]
        return DataLoader(samples, batch_size=BATCH)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


class Script:
    """Sizes for each batch, from the start: what a run with out-of-memory errors is compared with."""

    retries = False

    def __init__(self, sizes: Sequence[int | None]) -> None:
        self.sizes = list(sizes)

    def propose(self, shape: str, num_samples: int, num_elements: int) -> int | None:
        return self.sizes.pop(0)

    def note_success(self, *args: Any) -> None: ...
