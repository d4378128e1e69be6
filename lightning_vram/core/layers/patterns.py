"""What users may write where layers are chosen."""

from collections.abc import Sequence

from torch import nn


def check_layers(name: str, layers: object) -> None:
    """Reject what :func:`~lightning_vram.core.layers.selection.select_layers` does not take.

    Args:
        name: Argument as the user wrote it, with its class.
        layers: What the user passed.

    Raises:
        TypeError: If it is, or holds, something else than text and module classes.
        ValueError: If it names nothing.
    """
    patterns = layers if isinstance(layers, Sequence) and not isinstance(layers, str) else [layers]
    for pattern in patterns:
        if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
            raise TypeError(
                f"{name} must be 'auto', class names, module names, globs or nn.Module classes, "
                f"got {pattern!r} of type {type(pattern).__name__}."
            )
    if not patterns or "" in patterns:
        raise ValueError(f"{name} must name at least one layer, got {layers!r}. 'auto' finds them.")
