"""Decide which saved tensors may be stored with an error."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.core.hooks import is_exact_only
from lightning_vram.core.layers import LayerSelection, RunningLayers
from lightning_vram.core.tensors.codecs import LOSSY_FORMATS, LossyFormat, encoded_itemsize
from lightning_vram.private_names.torch import base_of, is_view

_DTYPES = frozenset([torch.float64, torch.float32, torch.float16, torch.bfloat16])
_SAVING = ("lightning_vram.", "torch.autograd.function")  # modules between autograd and who has it save something


def check_compression(lossy: object, layers: object, block_size: object, min_bytes: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` if ``CompressionStage`` does not take these."""
    if lossy is not None and lossy not in LOSSY_FORMATS:
        raise ValueError(f"CompressionStage(lossy) must be 'bf16', 'fp8', 'int8' or None, got {lossy!r}.")
    if layers is not None and lossy is None:
        raise ValueError(
            "CompressionStage(layers) needs a lossy format, got lossy=None. "
            "Set lossy to 'bf16', 'fp8' or 'int8', or leave layers out."
        )
    if layers is not None and not isinstance(layers, LayerSelection):
        for layer in layers if isinstance(layers, Sequence) else [layers]:
            if not isinstance(layer, nn.Module):
                raise TypeError(
                    "CompressionStage(layers) must be modules, such as select_layers() finds them by name, "
                    f"got {layer!r} of type {type(layer).__name__}."
                )
    check_positive_int("CompressionStage(block_size)", block_size)
    if not isinstance(min_bytes, int) or isinstance(min_bytes, bool):
        raise TypeError(
            f"CompressionStage(min_bytes) must be an int, got {min_bytes!r} of type {type(min_bytes).__name__}."
        )
    if min_bytes < 0:
        raise ValueError(f"CompressionStage(min_bytes) must not be negative, got {min_bytes}.")


class LossyPermission:
    """Which tensors may be stored lossy, apart from their values: those saved in ``layers``; ``None``: everywhere."""

    def __init__(self, lossy: LossyFormat, layers: LayerSelection | Sequence[nn.Module] | None, min_bytes: int) -> None:
        self._itemsize = encoded_itemsize(lossy)
        self._layers = RunningLayers(_modules_of(layers)) if layers is not None else None
        self._min_bytes = min_bytes

    def watching(self) -> AbstractContextManager[None]:
        """Know which layers run inside the block."""
        return self._layers.watching() if self._layers is not None else nullcontext()

    @property
    def is_inside(self) -> bool:
        """Whether one of the layers is running in this thread."""
        return self._layers is None or self._layers.is_inside

    def allows(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which is being saved, may get an error, unless its values forbid it."""
        if is_exact_only() or not self.is_inside or not tensor.requires_grad:
            return False
        base = base_of(tensor) if is_view(tensor) else None
        if (tensor if base is None else base).is_leaf:
            return False  # somebody else keeps its memory alive
        is_number = tensor.dtype in _DTYPES and tensor.dtype.itemsize > self._itemsize
        is_large = tensor.nbytes >= self._min_bytes and tensor.shape[-1:] != (1,)
        return is_number and is_large and not _is_input_of_checkpoint()


def _is_input_of_checkpoint() -> bool:
    """Whether a checkpoint of PyTorch, which runs its layer again on its input, saves that."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_SAVING):
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def _modules_of(layers: LayerSelection | Sequence[nn.Module]) -> list[nn.Module]:
    if not isinstance(layers, LayerSelection):
        return list(layers)
    modules: list[nn.Module] = []
    for layer in layers.layers:
        modules += list(layer.module.children())[slice(*layer.span)] if layer.span is not None else [layer.module]
    return modules
