"""Refuse what a compression stage cannot be made of."""

from collections.abc import Sequence

from torch import nn

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.core.layers.selection import LayerSelection
from lightning_vram.techniques.activation_compression.lossy_codecs import LOSSY_FORMATS


def check_compression(lossy: object, layers: object, block_size: object, min_bytes: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` if ``CompressionStage`` does not take these."""
    if lossy is not None and lossy not in LOSSY_FORMATS:
        raise ValueError(f"CompressionStage(lossy) must be 'bf16', 'fp8', 'int8' or None, got {lossy!r}.")
    if layers is not None and lossy is None:
        raise ValueError(
            "CompressionStage(layers) says where to store with a loss, and lossy=None says not to. "
            "Set lossy to 'bf16', 'fp8' or 'int8', or leave layers out."
        )
    if not isinstance(layers, LayerSelection | None):
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
