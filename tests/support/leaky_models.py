"""Models that keep what they should not, one for each way to do so."""

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

WIDTH, NUM_ROWS, NUM_BATCHES = 256, 8, 6
SAVED_COPY_BYTES = NUM_ROWS * WIDTH * 4  # of what they keep of each step
KEPT: list[Tensor] = []


class Plain(pl.LightningModule):
    """Two layers, trained on noise."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

    def loss(self, rows: Tensor) -> Tensor:
        return self.net(rows).square().mean()

    def hidden(self, rows: Tensor) -> Tensor:
        return self.net[0](rows)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self):
        return DataLoader([torch.randn(NUM_ROWS, WIDTH) for _ in range(NUM_BATCHES)], batch_size=None)

    val_dataloader = train_dataloader


class Losses(Plain):
    """The graphs go with their backward, all but their nodes."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss)
        return loss


class Outputs(Plain):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def training_step(self, batch, batch_idx):
        self.cache[self.global_step] = {"hidden": self.hidden(batch).detach()}
        return self.loss(batch)


class Metric(Plain):
    def __init__(self):
        super().__init__()
        self.scores = torchmetrics.CatMetric()

    def training_step(self, batch, batch_idx):
        self.scores.update(self.hidden(batch).detach().flatten())
        return self.loss(batch)


class MetricWithGraphs(Metric):
    def training_step(self, batch, batch_idx):
        self.scores.update(self.hidden(batch).flatten())
        return self.loss(batch)


class Curve(Plain):
    """The same; the metric keeps views that have no graph of their own, of tensors that have one."""

    def __init__(self):
        super().__init__()
        self.auroc = torchmetrics.AUROC("binary")

    def training_step(self, batch, batch_idx):
        scores = self.hidden(batch).sigmoid()
        self.auroc.update(scores, torch.ones(scores.shape, dtype=torch.long))
        return self.loss(batch)


class Global(Plain):
    def training_step(self, batch, batch_idx):
        KEPT.append(self.hidden(batch).detach())
        return self.loss(batch)


class Hook(Plain):
    def __init__(self):
        super().__init__()
        seen = []
        self.net[0].register_forward_hook(lambda module, inputs, output: seen.append(output))


class Total(Plain):
    """The classic: a sum that drags all steps along."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.total = self.total + loss
        return loss


class Validation(Plain):
    def __init__(self):
        super().__init__()
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        self.outputs.append(self.hidden(batch))


class Evaluation(Plain):
    """Collects outputs, with graphs or without, in any stage."""

    def __init__(self, *, with_graph=False):
        super().__init__()
        self.outputs, self.with_graph = [], with_graph

    def validation_step(self, batch, batch_idx):
        with torch.set_grad_enabled(self.with_graph):
            self.outputs.append(self.hidden(batch))

    test_step = predict_step = validation_step

    def val_dataloader(self):
        return DataLoader([torch.randn(NUM_ROWS, WIDTH) for _ in range(30)], batch_size=None)

    test_dataloader = predict_dataloader = val_dataloader


class Manual(Plain):
    """A gradient penalty whose graph stays, of each step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.penalties = {}

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        self.penalties[self.global_step] = sum(gradient.square().sum() for gradient in gradients)
        self.manual_backward(loss)
        optimizer.step()


class Keeper(pl.Callback):
    def __init__(self) -> None:
        self.batches = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch.clone())
