"""Decide which saved tensors may be stored with an error."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

import torch
from torch import Tensor, nn

from lightning_vram.core.hooks.stage import is_exact_only
from lightning_vram.core.layers.running import RunningLayers
from lightning_vram.core.layers.selection import LayerSelection
from lightning_vram.private_names.torch.tensors import base_of, is_view
from lightning_vram.techniques.activation_compression.lossy_codecs import LossyFormat, encoded_itemsize

_DTYPES = frozenset([torch.float64, torch.float32, torch.float16, torch.bfloat16])


class LossyPermission:
    """What ``lossy`` is allowed for, apart from the values a tensor holds.

    Args:
        lossy: How it would be stored.
        layers: Modules, or a selection, in whose forwards. ``None``: everywhere.
        min_bytes: Smaller tensors are not.
    """

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
        if (base if base is not None else tensor).is_leaf:
            return False  # somebody else keeps its memory alive
        is_number = tensor.dtype in _DTYPES and tensor.dtype.itemsize > self._itemsize
        return is_number and tensor.nbytes >= self._min_bytes and tensor.shape[-1:] != (1,)


def is_checkpoint(frame: FrameType | None) -> bool:
    """Whether what ``frame`` saves is the input of a checkpoint of PyTorch, which runs its layer again on it."""
    if frame is not None and frame.f_globals.get("__name__") == "torch.autograd.function":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def _modules_of(layers: LayerSelection | Sequence[nn.Module]) -> list[nn.Module]:
    if not isinstance(layers, LayerSelection):
        return list(layers)
    modules: list[nn.Module] = []
    for layer in layers.layers:
        modules += list(layer.module.children())[slice(*layer.span)] if layer.span is not None else [layer.module]
    return modules
