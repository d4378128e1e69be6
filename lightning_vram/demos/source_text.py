"""Text that every machine has: the sources of Python's standard library."""

import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_vram.argument_checks import check_positive_int

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
        TypeError: If a size is no ``int``.
        ValueError: If a size is below 1, or the text is shorter than one window.
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
        check_positive_int("SourceText(batch_size)", batch_size)
        check_positive_int("SourceText(sequence_length)", sequence_length)
        if num_train_bytes is not None:
            check_positive_int("SourceText(num_train_bytes)", num_train_bytes)
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
        windows = _Windows(self._split()[0][: self.num_train_bytes], self.sequence_length)
        return DataLoader(windows, batch_size=self.batch_size, shuffle=True, drop_last=len(windows) > self.batch_size)

    @override
    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(_Windows(self._split()[1], self.sequence_length), batch_size=self.batch_size)

    @override
    def test_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()

    def _split(self) -> tuple[Tensor, Tensor]:
        if self._text is None:
            raise RuntimeError("SourceText has no text before setup(). Pass it to a Trainer, or call setup('fit').")
        start = len(self._text) - len(self._text) // VALIDATION_SHARE
        return self._text[:start], self._text[start:]


class _Windows(Dataset[Tensor]):
    """Consecutive windows of T + 1 bytes; each starts with the last byte of the one before."""

    def __init__(self, text: Tensor, sequence_length: int) -> None:
        self.text = text
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.sequence_length
        return self.text[start : start + self.sequence_length + 1].long()


def read_sources(folder: Path) -> Tensor:
    """Read the bytes of all ``*.py`` files below ``folder``, sorted by path, without tests and installed packages."""
    files = [file for file in sorted(folder.rglob("*.py")) if _SKIPPED.isdisjoint(file.parts)]
    if not files:
        raise FileNotFoundError(f"SourceText(path): no *.py file in '{folder}'.")
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
