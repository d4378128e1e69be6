"""Models small enough for any laptop, one per shape of network the package cares about, and what tests measure."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_vram.demos import ByteGPT, DigitsResNet
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

NUM_CLASSES = 10
VOCAB_SIZE = 17
NUM_SAMPLES = 12  # three batches of four
BATCH_SIZE = 4


class TinyCNN(nn.Sequential):
    """Conv, batch norm and ReLU stages: images [B, 3, 8, 8] -> logits [B, NUM_CLASSES]."""

    def __init__(self) -> None:
        super().__init__(
            *(layer for i in (3, 8) for layer in (nn.Conv2d(i, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, NUM_CLASSES),
        )

    def samples(self, size: int) -> TensorDataset:
        return TensorDataset(torch.randn(size, 3, 8, 8), torch.randint(NUM_CLASSES, (size,)))


class TinyGPT(nn.Module):
    """Pre-norm transformer blocks with dropout: tokens [B, T] -> logits [B, T, VOCAB_SIZE]."""

    def __init__(self, width: int = 16, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=4 * width, norm_first=True, batch_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=causal, is_causal=True)
        return self.head(hidden)

    def samples(self, size: int) -> TensorDataset:
        tokens = torch.randint(VOCAB_SIZE, (size, 12))
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])


class LitTiny(pl.LightningModule):
    """Trains a network by cross-entropy on random batches of four, fully determined by the seed."""

    def __init__(self, net: TinyCNN | TinyGPT) -> None:
        super().__init__()
        self.net = net

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.net(inputs).flatten(0, -2), targets.flatten())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.loss(batch)

    test_step = validation_step

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.net.samples(NUM_SAMPLES), batch_size=BATCH_SIZE)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.net.samples(BATCH_SIZE), batch_size=BATCH_SIZE)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader


class LitLinear(LitTiny):
    """Its gradients are numbers that bf16 holds, whatever the weights are."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        ramps = (torch.linspace(-1, 1, p.numel(), device=p.device).bfloat16().view_as(p) for p in self.parameters())
        return torch.stack([(p * r).sum().float() for p, r in zip(self.parameters(), ramps, strict=True)]).sum()


class LitManual(LitTiny):
    """The same with manual optimization: two optimizers take turns within a batch."""

    def __init__(self, net: TinyCNN | TinyGPT) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.AdamW(self.parameters(), lr=1e-2)]


class LitApart(LitManual):
    """The same, but each optimizer has parameters of its own, as float16 demands."""

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[::2], lr=0.1), torch.optim.AdamW(parameters[1::2], lr=1e-2)]


class LateTiny(LitTiny):
    """The same, but its layers are made in ``configure_model``, after every ``setup`` hook."""

    def __init__(self, make_net: Callable[[], TinyCNN | TinyGPT] = TinyGPT) -> None:
        pl.LightningModule.__init__(self)
        self.make_net = make_net
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.make_net()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.make_net().samples(NUM_SAMPLES), batch_size=BATCH_SIZE)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.make_net().samples(BATCH_SIZE), batch_size=BATCH_SIZE)


class TinyByteGPT(ByteGPT):
    def __init__(self) -> None:
        super().__init__(num_layers=2, width=16, num_heads=2, sequence_length=16)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randint(256, (NUM_SAMPLES, 17)), batch_size=BATCH_SIZE)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.randint(256, (BATCH_SIZE, 17)), batch_size=BATCH_SIZE)


class TinyDigitsResNet(DigitsResNet):
    def __init__(self) -> None:
        super().__init__(blocks_per_stage=(2,), width=4)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self._samples(NUM_SAMPLES), batch_size=BATCH_SIZE)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self._samples(BATCH_SIZE), batch_size=BATCH_SIZE)

    def _samples(self, size: int) -> TensorDataset:
        return TensorDataset(torch.randn(size, 1, 8, 8), torch.randint(NUM_CLASSES, (size,)))


CASES: dict[str, Callable[[], pl.LightningModule]] = {
    "cnn": lambda: LitTiny(TinyCNN()),
    "gpt": lambda: LitTiny(TinyGPT()),
    "byte_gpt": TinyByteGPT,
    "digits_resnet": TinyDigitsResNet,
}


class Forking(ModelParallelStrategy):
    """FSDP2 on two ranks; Lightning starts the others from a script."""

    def __init__(self) -> None:
        super().__init__(data_parallel_size=2, tensor_parallel_size=1)

    def _configure_launcher(self) -> None:
        self._launcher = _MultiProcessingLauncher(self, start_method="fork")


class ForkingOffload(FSDPOffloadStrategy):
    """``fsdp_offload`` on as many forked ranks as there are devices; every layer counts as large enough to shard."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"min_params": 100, **arguments})

    def _configure_launcher(self) -> None:
        if self.num_processes > 1:
            self._launcher = _MultiProcessingLauncher(self, start_method="fork")


def saved_bytes(module: nn.Module, compute_loss: Callable[[], Tensor]) -> int:
    """Bytes the autograd graph keeps for backward by its own account, parameters not counted.

    A second witness beside the tracker, which counts what is alive.
    """
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute_loss()  # the graph must outlive the count
    assert loss.requires_grad
    return sum(storages.values())


def describe_module(module: nn.Module) -> list[tuple[str, type, frozenset[str], frozenset[str]]]:
    """All that a technique might leave behind: classes, attributes and hooks of every module.

    A LightningModule's own attributes are left out: the Trainer sets some.
    """
    return [
        (
            name,
            type(part),
            frozenset(vars(part)) if not isinstance(part, pl.LightningModule) else frozenset(),
            frozenset(key for key, value in vars(part).items() if key.endswith("_hooks") and value),
        )
        for name, part in module.named_modules()
    ]


class PlantedError(RuntimeError):
    pass


def fail_in(model: pl.LightningModule, hook: str, trainer: pl.Trainer) -> None:
    """Fit ``model`` with a hook that raises; it is what it was afterwards."""

    def fail(*args: object, **kwargs: object) -> None:
        raise PlantedError

    setattr(model, hook, fail)
    with pytest.raises(PlantedError):
        trainer.fit(model)
    delattr(model, hook)


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def assert_equal_weights(one: nn.Module, other: nn.Module) -> None:
    """Parameters and buffers are the same to the bit, under the same names."""
    expected = other.state_dict()
    actual = one.state_dict()
    assert list(actual) == list(expected)
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name
