"""Models that show what each optimizer step is made of, and the big batch it should be made of."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

NUM_FEATURES, NUM_TOKENS, NUM_CLASSES = 3, 6, 5


class Scalar(pl.LightningModule):
    """The gradient of its only weight is the mean of the batch."""

    def __init__(self, values, batch_size=1):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.values = torch.as_tensor(values, dtype=torch.float64)
        self.batch_size = batch_size
        self.gradients = []
        self.zeroed_at = []

    def training_step(self, batch, batch_idx):
        return (self.weight * batch).mean()

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.weight.grad.item())

    def on_before_zero_grad(self, optimizer):
        self.zeroed_at.append(self.trainer.fit_loop.epoch_loop.batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(self.values, batch_size=self.batch_size)


class Ragged(pl.LightningModule):
    """Classifies tokens [B, T, NUM_FEATURES], some of which have no label; its loss divides by what ``weight`` says."""

    def __init__(self, batches, weight):
        super().__init__()
        self.net = nn.Linear(NUM_FEATURES, NUM_CLASSES, dtype=torch.float64)
        self.batches = batches
        self.weight = weight
        self.gradients = []

    def loss(self, batch):
        inputs, labels = batch["inputs"], batch["labels"]
        if self.weight == "shifted_tokens":
            inputs, labels = inputs[:, :-1], labels[:, 1:]
        dtype = next(self.parameters()).dtype
        logits = self.net(inputs.flatten(0, 1).to(dtype))
        if self.weight == "samples":
            return F.cross_entropy(logits, labels.flatten(), reduction="sum") / len(labels)
        return F.cross_entropy(logits, labels.flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(read_gradient(self))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self):
        return DataLoader(self.batches, batch_size=None)


def ragged_batches(num_batches, seed=0, *, is_ragged=True):
    """Batches of one to four sequences; the first two tokens are always labelled, the others by chance."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_batches):
        size = int(torch.randint(1, 5, (), generator=generator)) if is_ragged else 2
        inputs = torch.randn(size, NUM_TOKENS, NUM_FEATURES, generator=generator, dtype=torch.float64)
        labels = torch.randint(NUM_CLASSES, (size, NUM_TOKENS), generator=generator)
        if is_ragged:
            lengths = torch.randint(2, NUM_TOKENS + 1, (size, 1), generator=generator)
            labels[torch.arange(NUM_TOKENS) >= lengths] = -100
        batches.append({"inputs": inputs, "labels": labels})
    return batches


def read_gradient(module):
    gradients = [parameter.grad for parameter in module.parameters()]
    full = [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]
    return torch.cat([gradient.detach().flatten() for gradient in full])


def mean_gradient(model, batches):
    """The gradient of one big batch; it stays in the parameters, too."""
    model.zero_grad()
    model.loss({key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}).backward()
    return read_gradient(model)


def windows_of(batches, factors, unit, epoch, num_steps):
    """Cut the batches of an epoch into windows, by hand."""
    rest = list(batches)
    while rest:
        moment = epoch if unit == "by_epoch" else num_steps
        factor = max(((start, factor) for start, factor in factors.items() if start <= moment), default=(0, 1))[1]
        yield rest[:factor]
        rest = rest[factor:]
        num_steps += 1


class Stream(IterableDataset):
    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)


class Streaming(Scalar):
    """A loader that does not know its length."""

    def train_dataloader(self):
        return DataLoader(Stream(self.values), batch_size=1)


def fit_once(make_trainer, model, *callbacks, **arguments):
    """One epoch without validation; keyword arguments override. Returns the trainer."""
    defaults = {"max_epochs": 1, "limit_val_batches": 0}
    trainer = make_trainer(callbacks=list(callbacks), **(defaults | arguments))
    trainer.fit(model)
    return trainer
