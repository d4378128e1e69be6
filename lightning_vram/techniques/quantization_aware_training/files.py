"""Files of modules with rounded weights: tensors and plain values, which ``torch.load`` reads without running code."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.layers.selection import name_layers
from lightning_vram.core.surgery.class_swap import swap_class
from lightning_vram.private_names.torch.modules import own_parameters
from lightning_vram.techniques.quantization_aware_training.apply import (
    FakeQuantization,
    avoid_fast_paths,
    call_with,
    is_able,
)
from lightning_vram.techniques.quantization_aware_training.rounding import pack, range_of, round_input, unpack

_FORMAT = "lightning_vram quantized 1"
_KEY = "_lightning_vram_quantized"
_NAMES = _LEVELS, _SCALE, _INPUT = "weight_levels", "weight_scale", "input_range"


def save_quantized(module: nn.Module, quantization: FakeQuantization, path: str | PathLike[str]) -> None:
    """Write the state of a module, with its rounded layers as whole numbers and scales, for :func:`load_quantized`.

    Args:
        module: That ``quantization`` was applied to. Nothing of it is changed.
        quantization: Inputs of layers that have seen none are not rounded, unless it is dynamic.
        path: Of the file.
    """
    state = dict(nn.Module.state_dict(module))  # all of it: a module may leave out of its own what is frozen
    ranges = {} if quantization.is_dynamic else quantization.ranges()
    shared = {id(layer): name for name, layer in quantization.layers.items()}
    layers = {name: shared[id(layer)] for name, layer in name_layers(module).items() if id(layer) in shared}
    for name, first in layers.items():
        levels, scale = pack(module.get_submodule(name).get_parameter("weight"), quantization.bits)
        state.pop(f"{name}.weight")
        state |= {f"{name}.{_LEVELS}": levels, f"{name}.{_SCALE}": scale}
        if first in ranges:
            state[f"{name}.{_INPUT}"] = ranges[first]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"format": _FORMAT, "is_dynamic": quantization.is_dynamic, "layers": list(layers), "state_dict": state}, path
    )


def load_quantized(module: nn.Module, path: str | PathLike[str], *, as_float: bool = False) -> nn.Module:
    """Load a file of ``QuantizationAwareTraining`` or ``quantize_after_fit`` into a module, for evaluation.

    Weights stay in 8 or 4 bits and are dequantized in each call, which saves memory but no time. Inputs are quantized
    as in training. Weights are not parameters any more. Copies and pickles of the module work.

    Args:
        module: Instance of the class that was trained; changed in place.
        path: Path of the file.
        as_float: Load the quantized weights as ordinary float parameters, and leave layers unchanged: for exporters,
            and for ``torchao``, which quantize inputs themselves.

    Returns:
        ``module``, in evaluation mode.

    Raises:
        ValueError: If the file has another format, or has layers that ``module`` does not have.
        RuntimeError: If the other tensors do not fit, as in ``load_state_dict``.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
        raise ValueError(f"load_quantized(path) must be a file of QuantizationAwareTraining, got {str(path)!r}.")
    state, names = saved["state_dict"], name_layers(module)
    for name in saved["layers"]:
        if name not in names or not is_able(names[name]):
            raise ValueError(
                f"load_quantized(module) must be what was saved: {type(module).__name__} has no layer {name!r}."
            )
    if as_float:
        for name in saved["layers"]:
            _decode(state, name, names[name].get_parameter("weight"))
    else:
        _view_as_bits(state, saved["layers"])
        for layer, name in {names[name]: name for name in saved["layers"]}.items():
            _quantize(layer, *(state.get(f"{name}.{key}") for key in _NAMES), is_dynamic=saved["is_dynamic"])
        avoid_fast_paths(module)
    module.load_state_dict(state)
    return module.eval()


def _view_as_bits(state: dict[str, Tensor], layers: list[str]) -> None:
    """Make int32 of the float32 scales and ranges of layers, which ``to(bfloat16)`` keeps."""
    for key in (f"{name}.{key}" for name in layers for key in (_SCALE, _INPUT)):
        if key in state:
            state[key] = state[key].view(torch.int32)


def _decode(state: dict[str, Tensor], name: str, weight: Tensor) -> None:
    levels, scale, _ = (state.pop(f"{name}.{key}", None) for key in _NAMES)
    assert levels is not None and scale is not None  # noqa: PT018 - of one layer
    state[f"{name}.weight"] = unpack(levels, scale, weight.shape, weight.dtype)


class _Stored:
    """State of a layer with whole numbers for a weight."""

    def __init__(self, shape: torch.Size, *, has_range: bool, is_dynamic: bool) -> None:
        self.shape = shape
        self.has_range = has_range
        self.is_dynamic = is_dynamic


def _quantize(layer: nn.Module, levels: Tensor, scale: Tensor, known: Tensor | None, *, is_dynamic: bool) -> None:
    weight = own_parameters(layer).pop("weight")
    assert weight is not None
    stored = _Stored(weight.shape, has_range=known is not None, is_dynamic=is_dynamic)
    for name, value in zip(_NAMES, (levels, scale, known), strict=True):
        if value is not None:
            layer.register_buffer(name, torch.empty_like(value, device=weight.device))
    swap_class(layer, _KEY, stored, _run, in_copies=True)


def _run(layer: Any, stored: _Stored, plain: Callable[..., Tensor], /, input: Tensor) -> Tensor:
    if input.numel() and (stored.has_range or stored.is_dynamic):
        input = round_input(input, layer.input_range.view(torch.float32) if stored.has_range else range_of(input))
    weight = unpack(layer.weight_levels, layer.weight_scale.view(torch.float32), stored.shape, input.dtype)
    return call_with(layer, input, weight)
