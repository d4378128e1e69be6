"""Which layers can have their weights in few bits, and which are chosen."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_vram.core.layers.patterns import LayerPattern, match_layers
from lightning_vram.core.layers.selection import other_owners
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES
from lightning_vram.private_names.torch.modules import own_parameters
from lightning_vram.techniques.quantize_frozen_weights.quantized_weight import quantized_weight

MIN_NUMBERS = 4096
"""Smaller weights are left alone."""
_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
_OF_TRANSFORMERS = "transformers.pytorch_utils.Conv1D"  # by name: it may not be installed
_READ_FROM_OUTSIDE = nn.modules.linear.NonDynamicallyQuantizableLinear
_LATE = (
    "its weight is sharded already. Make and freeze the layer in __init__, or call quantize_frozen_weights(self, ...) "
    "in configure_model before fully_shard"
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def find_able(model: nn.Module, names: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Layers that can be quantized, if whoever shares the weight can be, too.

    Raises:
        ValueError: If FSDP2 has sharded one before.
    """
    for name, layer in names.items():
        if why_not(layer) == _LATE:
            raise ValueError(f"{name!r} cannot be quantized: {_LATE}.")
    able = _by_first_name({name: layer for name, layer in names.items() if why_not(layer) is None})
    others = other_owners(model, able.values())
    return {name: layer for name, layer in able.items() if id(own_parameters(layer)["weight"]) not in others}


def find_named(
    model: nn.Module, names: dict[str, nn.Module], layers: LayerPattern | Sequence[LayerPattern]
) -> dict[str, nn.Module]:
    """Return what ``layers`` names, or what can be quantized inside of it.

    Raises:
        ValueError: If a pattern matches nothing, or what cannot be quantized.
    """
    found: dict[str, nn.Module] = {}
    for pattern in [layers] if isinstance(layers, str | type) else layers:
        before = len(found)
        for name in (matched := match_layers(pattern, names, type(model).__name__)):
            found |= _able_inside(name, names, f"layers={pattern!r}")
        if len(found) == before:
            raise ValueError(f"layers={pattern!r} names {matched[0]!r}, which has no frozen layer to quantize.")
    found = _by_first_name(found)
    others = other_owners(model, found.values())
    for name, layer in found.items():
        if id(own_parameters(layer)["weight"]) in others:
            raise ValueError(f"{name!r} cannot be quantized: a module that layers= does not name shares its weight.")
    return found


def _able_inside(name: str, names: dict[str, nn.Module], argument: str) -> dict[str, nn.Module]:
    """Return the layer of this name, or what can be quantized inside of a module that is none."""
    reason = why_not(names[name])
    if reason is None:
        return {name: names[name]}
    if isinstance(names[name], _KINDS) or not any(names[name].children()):
        raise ValueError(f"{argument} names {name!r}, which cannot be quantized: {reason}.")
    inside = {other: layer for other, layer in names.items() if other.startswith(f"{name}.")}
    return {other: layer for other, layer in inside.items() if why_not(layer) is None}


def _by_first_name(layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    first = {layer: name for name, layer in reversed(layers.items())}
    return {name: layer for name, layer in layers.items() if first[layer] == name}


def why_not(layer: nn.Module) -> str | None:
    """Return why the weight of ``layer`` cannot be kept in few bits, or ``None`` if it can, or is already."""
    if quantized_weight(layer) is not None:
        return None
    is_known = isinstance(layer, _KINDS) or any(
        f"{kind.__module__}.{kind.__qualname__}" == _OF_TRANSFORMERS for kind in type(layer).__mro__
    )
    if not is_known or isinstance(layer, torch.jit.ScriptModule):
        return f"it is a {type(layer).__name__}, not a linear layer, a convolution or an embedding"
    weight = own_parameters(layer).get("weight")
    if weight is None:
        return "its weight is parametrized, so it is computed from others"
    return _why_not_weight(weight) or _why_read_elsewhere(layer)


def _why_not_weight(weight: Tensor) -> str | None:
    if weight.requires_grad:
        return "its weight is trained: freeze it with requires_grad_(False), or name other layers"
    if isinstance(weight, DTensor) and weight.dtype in _DTYPES and weight.numel() >= MIN_NUMBERS:
        return _LATE
    if type(weight) not in PARAMETER_CLASSES or weight.dtype not in _DTYPES or weight.layout is not torch.strided:
        return f"its weight is a {type(weight).__name__} of {weight.dtype}"
    return f"its weight has fewer than {MIN_NUMBERS} numbers" if weight.numel() < MIN_NUMBERS else None


def _why_read_elsewhere(layer: nn.Module) -> str | None:
    if isinstance(layer, _READ_FROM_OUTSIDE):
        return "nn.MultiheadAttention reads its weight without calling it"
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "its max_norm writes to its weight"
    return None
