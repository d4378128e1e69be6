"""Small real models and data for the quickstart, the examples and the tests. Nothing is downloaded."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

MLP_RATIO = 4
INIT_STD = 0.02


class MLP(nn.Module):
    """The feed-forward part of a block: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, MLP_RATIO * width)
        self.project = nn.Linear(MLP_RATIO * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position."""
        out: Tensor = self.project(F.gelu(self.expand(self.norm(hidden)), approximate="tanh"))
        return out


class Block(nn.Module):
    """One pre-norm transformer block: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = MLP(width)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend, then transform each position."""
        hidden = hidden + self.residual_dropout(self._attend(self.attention_norm(hidden)))
        out: Tensor = hidden + self.residual_dropout(self.mlp(hidden))
        return out

    def _attend(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1))  # [B, T, 3, H, D / H]
        query, key, value = heads.transpose(1, 3).unbind(2)  # each [B, H, T, D / H]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out


class GPT(nn.Module):
    """GPT-2 style, pre-norm, with fused attention and learned positions: tokens [B, T] -> logits [B, T, vocab_size]."""

    def __init__(
        self, vocab_size: int, num_layers: int, width: int, num_heads: int, sequence_length: int, dropout: float
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(sequence_length, width)
        self.embed_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.apply(_init)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the token after each position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embed_dropout(self.embed(tokens) + self.position(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


NUM_BYTES = 256


class ByteGPT(pl.LightningModule):
    """Learn to predict the next byte of a text with a GPT of any size.

    The defaults are a toy that trains on a laptop; ``ByteGPT(48, 1600, 25, 1024)`` has the body of GPT-2 XL, 1.5
    billion parameters. Logs ``train_loss`` and ``val_loss`` in nats per byte: 5.55 (ln 256) untrained, below 2.9
    after a hundred steps of eight sequences of 128 bytes with two layers. AdamW, a warm-up of 20 steps.

    Args:
        num_layers: Number of blocks.
        width: Size D of the hidden states.
        num_heads: Attention heads; must divide ``width``.
        sequence_length: Longest sequence T in bytes.
        dropout: Probability, on embeddings, attention and residual branches.
        tie_head: Whether the head uses the embedding's weight.

    Raises:
        ValueError: If ``num_heads`` does not divide ``width``.

    Shape:
        Batch: tokens [B, T + 1] of dtype int64, 0 to 255.
    """

    def __init__(
        self,
        num_layers: int = 4,
        width: int = 128,
        num_heads: int = 4,
        sequence_length: int = 256,
        dropout: float = 0.1,
        tie_head: bool = True,  # noqa: FBT001, FBT002 - set by name in configuration files
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"ByteGPT(num_heads) must divide width={width}, got {num_heads}.")
        self.save_hyperparameters()
        self.net = GPT(NUM_BYTES, num_layers, width, num_heads, sequence_length, dropout)
        if tie_head:
            self.net.head.weight = self.net.embed.weight

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(tokens)
        return logits

    @override
    def training_step(self, batch: Tensor) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    @override
    def test_step(self, batch: Tensor) -> None:
        self.log("test_loss", self._loss(batch))

    @override
    def predict_step(self, batch: Tensor) -> Tensor:
        return self.forward(batch[:, :-1]).argmax(-1)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        # The usual scaling: wider networks take smaller steps.
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.256 / self.hparams["width"], weight_decay=0.1)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


VALIDATION_SHARE = 20  # one byte in this many, from the end of the text
_SKIPPED = {"site-packages", "test", "tests"}  # some Pythons come without tests; all must read the same text


class SourceText(pl.LightningDataModule):
    """Windows of bytes from a folder of Python sources, by default the standard library's (several MB).

    Args:
        batch_size: Windows per batch B.
        sequence_length: Bytes T that are predicted per window.
        num_train_bytes: How much of the text to train on, from its beginning. ``None`` takes it all.
        path: Folder of ``*.py`` files, searched with its subfolders. ``None`` is the standard library.

    Raises:
        ValueError: If the text is too short for windows of that length.
        FileNotFoundError: If ``path`` holds no ``*.py`` file.

    Shape:
        Batch: tokens [B, T + 1] of dtype int64, 0 to 255.
    """

    def __init__(
        self,
        batch_size: int = 8,
        sequence_length: int = 256,
        num_train_bytes: int | None = None,
        path: str | None = None,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.num_train_bytes = num_train_bytes
        self.path = path
        self._text: Tensor | None = None

    @override
    def setup(self, stage: str) -> None:
        if self._text is None:
            self._text = read_sources(Path(self.path or sysconfig.get_paths()["stdlib"]))
            if len(self._text) < VALIDATION_SHARE * (self.sequence_length + 1):
                raise ValueError(
                    f"SourceText(sequence_length) is {self.sequence_length}, too long for {len(self._text)} bytes "
                    f"of text: at least {VALIDATION_SHARE} sequences are needed."
                )

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        windows = self._windows(is_training=True)
        is_many = len(windows) > self.batch_size
        return DataLoader(windows, batch_size=self.batch_size, shuffle=True, drop_last=is_many, collate_fn=_collate)

    @override
    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._windows(is_training=False), batch_size=self.batch_size, collate_fn=_collate)

    test_dataloader = predict_dataloader = val_dataloader

    def _windows(self, *, is_training: bool) -> Any:
        """Return consecutive windows of T + 1 bytes; each starts with the last byte of the one before."""
        self.setup("fit")
        assert self._text is not None
        start = len(self._text) - len(self._text) // VALIDATION_SHARE
        text = self._text[:start][: self.num_train_bytes] if is_training else self._text[start:]
        return text.unfold(0, self.sequence_length + 1, self.sequence_length)


def _collate(windows: list[Tensor]) -> Tensor:
    return torch.stack(windows).long()


def read_sources(folder: Path) -> Tensor:
    """Read the bytes of all ``*.py`` files below ``folder``, sorted by path, without tests and installed packages."""
    files = [file for file in sorted(folder.rglob("*.py")) if _SKIPPED.isdisjoint(file.parts)]
    if not files:
        raise FileNotFoundError(f"SourceText(path): no *.py file in '{folder}'.")
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut: [B, C, H, W] -> [B, 4 width, H / stride, W / stride]."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = EXPANSION * width
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Add the three convolutions to the shortcut."""
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        out: Tensor = self.relu(self.bn3(self.conv3(hidden)) + self.shortcut(images))
        return out


class ResNet(nn.Module):
    """He et al. 2015, https://arxiv.org/abs/1512.03385: images [B, in_channels, H, W] -> logits [B, num_classes].

    Each stage after the first halves H and W, and doubles the channels.
    """

    def __init__(self, blocks_per_stage: Sequence[int], width: int, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages, channels = [], width
        for stage, num_blocks in enumerate(blocks_per_stage):
            inner = width * 2**stage
            strides = [1 if stage == 0 else 2] + [1] * (num_blocks - 1)
            inputs = [channels] + [EXPANSION * inner] * (num_blocks - 1)
            stages.append(nn.Sequential(*(Bottleneck(i, inner, s) for i, s in zip(inputs, strides, strict=True))))
            channels = EXPANSION * inner
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Classify."""
        logits: Tensor = self.head(self.pool(self.stages(self.stem(images))).flatten(1))
        return logits


NUM_DIGITS = 10


class DigitsResNet(pl.LightningModule):
    """Classify images of digits with a bottleneck ResNet of any size.

    The defaults are a toy that trains on a laptop: above 93 % validation accuracy after five epochs of
    :class:`DigitsData`. ``DigitsResNet((3, 4, 6, 3), 64)`` has the body of ResNet-50. Logs ``train_loss``,
    ``val_loss`` and ``val_accuracy``.

    Args:
        blocks_per_stage: Number of bottlenecks per stage; each stage after the first halves the image.
        width: Channels inside the bottlenecks of the first stage; doubles with each stage.
        in_channels: Channels of the images.

    Shape:
        Batch: images [B, in_channels, H, W] of dtype float32, labels [B] of dtype int64.
    """

    def __init__(self, blocks_per_stage: Sequence[int] = (2, 2), width: int = 16, in_channels: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = ResNet(blocks_per_stage, width, in_channels, NUM_DIGITS)
        self.val_accuracy = MulticlassAccuracy(NUM_DIGITS, average="micro")

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy.update(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.forward(batch[0]).argmax(-1)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


NUM_VALIDATION = 297
MAX_PIXEL = 16.0

_Batch = tuple[Tensor, ...]


class DigitsData(pl.LightningDataModule):
    """1500 digits to train on, 297 to validate on. Needs scikit-learn (extra ``examples``).

    Args:
        batch_size: Images per batch B.
        image_size: Height and width H of the images, enlarged from 8.

    Raises:
        ModuleNotFoundError: In ``setup``, if scikit-learn is not installed.

    Shape:
        Batch: images [B, 1, H, H] of dtype float32, labels [B] of dtype int64.
    """

    def __init__(self, batch_size: int = 32, image_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.image_size = image_size
        self._digits: TensorDataset | None = None

    @override
    def setup(self, stage: str) -> None:
        if self._digits is not None:
            return
        try:
            from sklearn.datasets import load_digits  # an extra: the package imports without it
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "DigitsData needs scikit-learn, which is not installed: pip install scikit-learn"
            ) from None
        digits, size = load_digits(), (self.image_size, self.image_size)
        images = torch.as_tensor(digits.images / MAX_PIXEL, dtype=torch.float32).unsqueeze(1)
        images = F.interpolate(images, size, mode="bilinear", align_corners=False)
        self._digits = TensorDataset(images, torch.as_tensor(digits.target, dtype=torch.int64))

    @override
    def train_dataloader(self) -> DataLoader[_Batch]:
        return self._loader(slice(None, -NUM_VALIDATION), shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[_Batch]:
        return self._loader(slice(-NUM_VALIDATION, None), shuffle=False)

    predict_dataloader = val_dataloader

    def _loader(self, part: slice, *, shuffle: bool) -> DataLoader[_Batch]:
        self.setup("fit")
        assert self._digits is not None
        return DataLoader(TensorDataset(*self._digits[part]), batch_size=self.batch_size, shuffle=shuffle)
