"""Handwritten digits that come with scikit-learn: 1797 images of 8x8 pixels, nothing to download."""

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_vram.argument_checks import check_positive_int

NUM_VALIDATION = 297
MAX_PIXEL = 16.0

_Batch = tuple[Tensor, ...]


class DigitsData(pl.LightningDataModule):
    """1500 digits to train on, 297 to validate on. Needs scikit-learn (extra ``examples``).

    Args:
        batch_size: Images per batch B.
        image_size: Height and width H of the images, enlarged from 8.

    Raises:
        TypeError: If a size is no ``int``.
        ValueError: If a size is below 1.
        ModuleNotFoundError: In ``setup``, if scikit-learn is not installed.

    Shape:
        Batch: images [B, 1, H, H] of dtype float32, labels [B] of dtype int64.
    """

    def __init__(self, batch_size: int = 32, image_size: int = 8) -> None:
        super().__init__()
        check_positive_int("DigitsData(batch_size)", batch_size)
        check_positive_int("DigitsData(image_size)", image_size)
        self.batch_size = batch_size
        self.image_size = image_size
        self._digits: tuple[Tensor, Tensor] | None = None

    @override
    def setup(self, stage: str) -> None:
        if self._digits is None:
            images, labels = _load_digits()
            size = (self.image_size, self.image_size)
            self._digits = F.interpolate(images, size, mode="bilinear", align_corners=False), labels

    @override
    def train_dataloader(self) -> DataLoader[_Batch]:
        return DataLoader(self._slice(slice(None, -NUM_VALIDATION)), batch_size=self.batch_size, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[_Batch]:
        return DataLoader(self._slice(slice(-NUM_VALIDATION, None)), batch_size=self.batch_size)

    @override
    def predict_dataloader(self) -> DataLoader[_Batch]:
        return self.val_dataloader()

    def _slice(self, part: slice) -> TensorDataset:
        if self._digits is None:
            raise RuntimeError("DigitsData has no images before setup(). Pass it to a Trainer, or call setup('fit').")
        return TensorDataset(*(tensor[part] for tensor in self._digits))


def _load_digits() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits  # an extra: the package imports without it
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "DigitsData needs scikit-learn, which is not installed: pip install scikit-learn"
        ) from None
    digits = load_digits()
    images = torch.as_tensor(digits.images / MAX_PIXEL, dtype=torch.float32).unsqueeze(1)
    return images, torch.as_tensor(digits.target, dtype=torch.int64)
