"""Cut sequential bodies into segments that are checkpointed as one layer each."""

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt
from typing import Literal

from torch import nn

from lightning_vram.core.layers.conv_stages import is_stock_sequential
from lightning_vram.core.layers.patterns import LayerPattern
from lightning_vram.core.layers.selection import Layer, LayerSelection, name_layers, outermost, select_layers

Segments = int | Literal["sqrt"]
_MIN_BODY = 4  # layers of a Sequential that is found by itself: heads and the like have fewer


def select_segments(
    model: nn.Module, layers: LayerPattern | Sequence[LayerPattern], segments: Segments
) -> LayerSelection:
    """Choose the segments of the sequential bodies of ``model``, one layer each, in the model's order.

    A body of n equal layers in k segments saves k inputs, and n / k layers while one segment is recomputed: least at k
    = sqrt(n) (Chen et al. 2016, https://arxiv.org/abs/1604.06174). ``torch.utils.checkpoint.checkpoint_sequential``
    does not checkpoint the last segment, so that one segment is none; here all are.

    ``layers``: ``"auto"`` for the outermost ``nn.Sequential`` s with four or more layers; else patterns, which must
    match ones with two or more. ``segments``: number per body, at least 2, or ``"sqrt"`` of its layers. Layers are
    children with parameters; children without (activations, dropout) go with the layer before them.
    """
    chosen: list[Layer] = []
    for body in _find_bodies(model, layers):
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
    return [place for place, child in enumerate(body.children()) if any(True for _ in child.parameters())]


def _find_bodies(model: nn.Module, layers: LayerPattern | Sequence[LayerPattern]) -> list[Layer]:
    """Find the ``nn.Sequential`` s of ``model``, itself among them, that can be cut into segments."""
    names = {"": model, **name_layers(model)}
    sequentials = {name: len(_layer_starts(part)) for name, part in names.items() if is_stock_sequential(part)}
    bodies = {name: num_layers for name, num_layers in sequentials.items() if num_layers > 1}
    if isinstance(layers, str) and layers == "auto":
        large = {name for name, num_layers in bodies.items() if num_layers >= _MIN_BODY}
        found = outermost(large, names) if "" not in large else [Layer("", model)]
        if not found:
            raise ValueError(
                f"segments finds no nn.Sequential with {_MIN_BODY} or more layers in {type(model).__name__}: the "
                "model's own code calls the layers of a ModuleList. Use every_n_layers, or name a shorter body."
            )
        return found
    selection = select_layers(model, layers)
    for layer in selection.layers:
        if layer.name not in bodies:
            raise ValueError(
                f"segments needs nn.Sequential bodies with two or more layers, but layers={layers!r} matches "
                f"{layer.name!r} ({type(layer.module).__name__}). Use every_n_layers, or name the nn.Sequential."
            )
    return list(selection.layers)
