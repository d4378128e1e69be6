"""Cut sequential bodies into segments that are checkpointed as one layer each.

A body of n equal layers in k segments keeps k inputs, and n / k layers while one segment is recomputed: least at
k = sqrt(n) (Chen et al. 2016, https://arxiv.org/abs/1604.06174). ``torch.utils.checkpoint.checkpoint_sequential`` does
not checkpoint the last segment, so that one segment is none; here all are.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt
from typing import Literal

from torch import nn

from lightning_vram.core.layers.selection import Layer, LayerPattern, LayerSelection, find_sequential_bodies

Segments = int | Literal["sqrt"]


def select_segments(
    model: nn.Module, layers: LayerPattern | Sequence[LayerPattern], segments: Segments
) -> LayerSelection:
    """Choose the segments of the sequential bodies of ``model``.

    Args:
        model: The whole model.
        layers: ``"auto"``: the outermost ``nn.Sequential`` s with two or more layers of parameters; else patterns that
            match ``nn.Sequential`` s, as in :func:`~lightning_vram.core.layers.selection.select_layers`.
        segments: Number per body, at least 2, or ``"sqrt"`` of its layers. Layers are children with parameters; what
            has none (activations, dropout) goes with the layer before it.

    Returns:
        One layer per segment, in the model's order.

    Raises:
        ValueError: If there is no sequential body, or one has fewer layers than segments.
    """
    chosen: list[Layer] = []
    for body in find_sequential_bodies(model, layers):
        starts = _layer_starts(body.module)
        number = max(2, round(len(starts) ** 0.5)) if segments == "sqrt" else segments
        if number > len(starts):
            raise ValueError(
                f"segments={segments} is more than the {len(starts)} layers with parameters of {body.name!r}. "
                f"Use segments='sqrt' ({max(2, isqrt(len(starts)))}) or fewer."
            )
        cuts = [0, *(starts[len(starts) * part // number] for part in range(1, number)), len(body.module)]  # type: ignore[arg-type]
        chosen += [Layer(f"{body.name}[{start}:{stop}]", body.module, (start, stop)) for start, stop in pairwise(cuts)]
    return LayerSelection(tuple(chosen))


def _layer_starts(body: nn.Module) -> list[int]:
    """Positions of the children with parameters."""
    return [place for place, child in enumerate(body.children()) if any(True for _ in child.parameters())]
