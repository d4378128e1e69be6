"""Let layers of a module compute with rounded weights and inputs, and undo it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.layers.patterns import LayerPattern, match_layers
from lightning_vram.core.layers.selection import name_layers, other_owners
from lightning_vram.core.surgery.class_swap import plain_class_forward, restore_class, swap_class
from lightning_vram.private_names.torch.modules import convolve_with, own_buffers, own_parameters
from lightning_vram.techniques.quantization_aware_training.rounding import range_of, round_input, round_weight, widen

Scheme = Literal["int8", "int4"]
"""Bits of a weight; inputs of layers have 8."""
KEY = "_lightning_vram_fake_quantization"
RANGE = "quantized_input_range"
"""A buffer, so that it moves with the layer, and DDP hands on that of rank 0; as bits, which ``to(bfloat16)`` keeps."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FORWARDS = {kind.forward for kind in (nn.Linear, *_CONVOLUTIONS)}


class FakeQuantization:
    """Layers that round, between :func:`apply_fake_quantization` and :meth:`remove`.

    Attributes:
        is_on: Whether they do. Else they compute as they did.
        observes: Whether ranges follow inputs also outside of training.
        is_dynamic: Whether inputs are rounded to the range of their own, not to that of the layer.
        layers: By name.
        hooks: On modules of PyTorch's that would read weights of their layers.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.is_on = False
        self.observes = False
        self.is_dynamic = False
        self.layers: dict[str, nn.Module] = {}
        self.hooks: list[RemovableHandle] = []

    def ranges(self) -> dict[str, Tensor]:
        """Return, on the host, the ranges [2] of the inputs of all layers that have seen one."""
        known = {name: _range(layer) for name, layer in self.layers.items()}
        return {name: value.cpu().clone() for name, value in known.items() if _is_known(value)}

    def load_ranges(self, ranges: Mapping[str, Tensor]) -> None:
        """Take ranges over, of layers that are known by name."""
        for name in self.layers.keys() & ranges.keys():
            layer = self.layers[name]
            _range(layer).copy_(ranges[name])
            vars(layer)[KEY].is_known = True

    def add(self, name: str, layer: nn.Module) -> None:
        """Let one more layer round."""
        unknown = torch.tensor(
            [torch.inf, -torch.inf], dtype=torch.float32, device=layer.get_parameter("weight").device
        )
        swap_class(layer, KEY, _State(self), _run, is_lowest=True)
        layer.register_buffer(RANGE, unknown.view(torch.int32), persistent=False)
        self.layers[name] = layer

    def remove(self) -> None:
        """Let all compute as they did. Twice does nothing."""
        while self.hooks:
            self.hooks.pop().remove()
        while self.layers:
            _, layer = self.layers.popitem()
            restore_class(layer, KEY)
            own_buffers(layer).pop(RANGE, None)


class _State:
    """Of one layer."""

    def __init__(self, shared: FakeQuantization) -> None:
        self.shared = shared
        self.is_known = False  # whether the layer has a range; that is on the device


def apply_fake_quantization(
    model: nn.Module, scheme: Scheme = "int8", layers: LayerPattern | Sequence[LayerPattern] = "auto"
) -> FakeQuantization:
    """Let linear layers and convolutions round weights and inputs, as soon as ``is_on`` is set.

    Weights are rounded per output channel, inputs to 256 levels of a range that follows those of training. Parameters
    and ``state_dict`` stay what they are. Gradients pass through what is not cut off.

    Args:
        model: Any module.
        scheme: Bits of weights.
        layers: ``"auto"``: all whose weight is that of no other module. Else names, globs, class names or classes:
            these, and layers inside of them.

    Raises:
        ValueError: If a pattern matches nothing, or nothing that can be rounded, or a layer that shares its weight with
            a module that is not rounded: what is saved would hold it twice, rounded and not.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_vram.techniques.quantization_aware_training import apply_fake_quantization
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> quantization = apply_fake_quantization(model, "int4")
        >>> quantization.is_on = True
        >>> model(torch.randn(4, 8)).sum().backward()
        >>> quantization.remove()
    """
    names = name_layers(model)
    able = {name: layer for name, layer in names.items() if is_able(layer)}
    if layers != "auto":
        able = _within(able, names, layers, type(model).__name__)
    others = other_owners(model, able.values())
    shared = [name for name, layer in able.items() if id(own_parameters(layer)["weight"]) in others]
    if shared and layers != "auto":
        raise ValueError(
            f"layers={layers!r} names {shared[0]!r}, which shares its weight with a module that is not rounded: "
            "name other layers."
        )
    able = {name: layer for name, layer in able.items() if name not in shared}
    quantization, seen = FakeQuantization(int(scheme.removeprefix("int"))), set[int]()
    try:
        for name, layer in able.items():
            if id(layer) not in seen:
                seen.add(id(layer))
                quantization.add(name, layer)
        quantization.hooks = avoid_fast_paths(model)
    except BaseException:
        quantization.remove()
        raise
    return quantization


def is_able(layer: nn.Module) -> bool:
    """Whether a layer is linear or a convolution, whose weight nobody else reads and no code computes."""
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or isinstance(
        layer, torch.jit.ScriptModule
    ):
        return False
    is_read = isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)  # by nn.MultiheadAttention
    weight = own_parameters(layer).get("weight")
    return plain_class_forward(layer) in _FORWARDS and not is_read and weight is not None and weight.is_floating_point()


def call_with(layer: nn.Module, input: Tensor, weight: Tensor) -> Tensor:
    """Return what a linear layer or a convolution makes of ``input`` with another weight."""
    bias: Any = layer.bias
    return F.linear(input, weight, bias) if isinstance(layer, nn.Linear) else convolve_with(layer, input, weight, bias)


def avoid_fast_paths(model: nn.Module) -> list[RemovableHandle]:
    """Let each ``nn.TransformerEncoderLayer`` call its layers in evaluation, too, as it does where it has a hook."""
    found = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    return [module.register_forward_pre_hook(_look_on) for module in found]


def _look_on(module: nn.Module, arguments: Any) -> None:
    """Change nothing."""


def _run(layer: nn.Module, state: _State, plain: Callable[..., Tensor], /, input: Tensor) -> Tensor:
    shared = state.shared
    if not shared.is_on:
        return plain(input)
    if shared.is_dynamic:
        input = round_input(input, range_of(input)) if input.numel() else input
    else:
        known = _range(layer)
        if (layer.training or shared.observes) and input.numel():
            widen(known, input)
            state.is_known = True
        if state.is_known:
            input = round_input(input, known)
    return call_with(layer, input, round_weight(layer.get_parameter("weight"), shared.bits))


def _within(
    able: dict[str, nn.Module],
    names: dict[str, nn.Module],
    layers: LayerPattern | Sequence[LayerPattern],
    model: str,
) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for pattern in [layers] if isinstance(layers, str | type) else layers:
        matched = match_layers(pattern, names, model)
        inside = {name: able[name] for name in able for one in matched if f"{name}.".startswith(f"{one}.")}
        if not inside:
            raise ValueError(
                f"layers={pattern!r} names {matched[0]!r}, which is no linear layer or convolution, and has none."
            )
        found |= inside
    return found


def _range(layer: nn.Module) -> Tensor:
    """Return the range [2] of the inputs of a layer, float32, which may be written to."""
    return layer.get_buffer(RANGE).view(torch.float32)


def _is_known(value: Tensor) -> bool:
    return bool(value.isfinite().all())
