"""Fake quantization of weights and inputs of layers in training; files of quantized models.

Weights have one scale per output channel, inputs 256 levels of a range that follows those of training. By PyTorch's
operators for fake quantization, whose gradient passes straight through what is not clipped (Jacob et al. 2018,
https://arxiv.org/abs/1712.05877). May import: core, memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.layers import LayerPattern, choose_able, name_layers
from lightning_vram.core.patching import plain_class_forward, restore_class, swap_class
from lightning_vram.private_names.torch import convolve_with, own_buffers, own_parameters

_SMALLEST = 1e-20  # a scale: its inverse is finite
_MAX_LEVEL = 255  # of inputs
_MOMENTUM = 0.01  # of ranges, as PyTorch's moving averages have it


def weight_scale(weight: Tensor, bits: int) -> Tensor:
    """Return the float32 scale [out] of each output channel of ``weight`` [out, ...]."""
    return (weight.detach().flatten(1).abs().amax(1).float() / _limit(bits)).clamp_min(_SMALLEST)


def round_weight(weight: Tensor, bits: int) -> Tensor:
    """Return ``weight`` [out, ...] rounded to levels of ``bits`` bits."""
    scale, limit = weight_scale(weight, bits), _limit(bits)
    zero = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -limit, limit)


def range_of(input: Tensor) -> Tensor:
    """Return the float32 range [2] of ``input``, extended to zero."""
    low, high = torch.aminmax(input.detach())
    return torch.stack([low.clamp(max=0), high.clamp(min=0)]).float()


@torch.no_grad()
def widen(known: Tensor, input: Tensor) -> None:
    """Update the range ``known`` [2], infinite at first, by the moving average."""
    seen = range_of(input)
    known.copy_(torch.where(known.isfinite(), known.lerp(seen, _MOMENTUM), seen))


def round_input(input: Tensor, known: Tensor) -> Tensor:
    """Return ``input`` rounded to 256 levels of the range ``known`` [2], and clipped to it."""
    low, high = known.unbind()
    scale = ((high - low) / _MAX_LEVEL).clamp_min(_SMALLEST)
    return torch.fake_quantize_per_tensor_affine(input, scale, (-low / scale).round().to(torch.int32), 0, _MAX_LEVEL)


def pack(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the levels of ``weight`` [out, ...] as bytes, two per byte with 4 bits, and their scale [out]."""
    scale = weight_scale(weight, bits)
    levels = (round_weight(weight.detach(), bits).float() / _along_rows(scale, weight)).round().to(torch.int8)
    if bits == 4:
        nibbles = torch.nn.functional.pad((levels.flatten() + 8).to(torch.uint8), (0, levels.numel() % 2))
        return nibbles[::2] | nibbles[1::2] << 4, scale
    return levels, scale


def unpack(packed: Tensor, scale: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the weight of ``shape`` [out, ...] that :func:`pack` was given, rounded."""
    if packed.dtype is torch.uint8:
        packed = torch.stack([packed & 15, packed >> 4], 1).flatten()[: shape.numel()].to(torch.int8) - 8
    levels = packed.reshape(shape)
    return (levels.float() * _along_rows(scale, levels)).to(dtype)


def _limit(bits: int) -> int:
    return (1 << bits - 1) - 1  # the same to both sides: a rounded weight is rounded to itself


def _along_rows(scale: Tensor, weight: Tensor) -> Tensor:
    return scale.view(-1, *(1 for _ in weight.shape[1:]))


Scheme = Literal["int8", "int4"]
"""Bits of a weight; inputs of layers have 8."""
KEY = "_lightning_vram_fake_quantization"
RANGE = "quantized_input_range"
"""A buffer: it moves with the layer, and DDP broadcasts that of rank 0. As int32, which ``to(bfloat16)`` keeps."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FORWARDS = {kind.forward for kind in (nn.Linear, *_CONVOLUTIONS)}


class FakeQuantization:
    """Layers that round weights and inputs, from :func:`apply_fake_quantization` to :meth:`remove`."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.is_on = False
        self.observes = False  # whether ranges follow inputs outside of training, too
        self.is_dynamic = False  # whether inputs are rounded to their own range, not that of the layer
        self.layers: dict[str, nn.Module] = {}  # by name
        self.hooks: list[RemovableHandle] = []

    def ranges(self) -> dict[str, Tensor]:
        """Return, on the host, the ranges [2] of the inputs of all layers that have seen one."""
        known = {name: _range(layer) for name, layer in self.layers.items()}
        return {name: value.cpu().clone() for name, value in known.items() if value.isfinite().all()}

    def load_ranges(self, ranges: Mapping[str, Tensor]) -> None:
        """Load the ranges of layers of these names."""
        for name in self.layers.keys() & ranges.keys():
            layer = self.layers[name]
            _range(layer).copy_(ranges[name])
            vars(layer)[KEY].is_known = True

    def add(self, name: str, layer: nn.Module) -> None:
        """Apply to one more layer."""
        unknown = torch.tensor(
            [torch.inf, -torch.inf], dtype=torch.float32, device=layer.get_parameter("weight").device
        )
        swap_class(layer, KEY, _State(self), _run, is_lowest=True)
        layer.register_buffer(RANGE, unknown.view(torch.int32), persistent=False)
        self.layers[name] = layer

    def remove(self) -> None:
        """Undo the changes. Twice does nothing."""
        while self.hooks:
            self.hooks.pop().remove()
        while self.layers:
            _, layer = self.layers.popitem()
            restore_class(layer, KEY)
            own_buffers(layer).pop(RANGE, None)


class _State:
    """What a layer carries."""

    def __init__(self, shared: FakeQuantization) -> None:
        self.shared = shared
        self.is_known = False  # whether the layer has a range; the range itself is on the device


def apply_fake_quantization(
    model: nn.Module, scheme: Scheme = "int8", layers: LayerPattern | Sequence[LayerPattern] = "auto"
) -> FakeQuantization:
    """Let linear layers and convolutions round weights and inputs, as soon as ``is_on`` is set.

    Parameters and ``state_dict`` do not change. ``layers="auto"`` leaves out those that share their weight with a
    module that does not round: a saved file would hold it twice, rounded and not.

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
    chosen = choose_able(model, layers, _why_not)
    quantization = FakeQuantization(int(scheme.removeprefix("int")))
    try:
        for name, layer in chosen.items():
            quantization.add(name, layer)
        quantization.hooks = avoid_fast_paths(model)
    except BaseException:
        quantization.remove()
        raise
    return quantization


def is_able(layer: nn.Module) -> bool:
    """Whether a layer is a stock linear layer or convolution with a weight that only it reads."""
    if not isinstance(layer, (nn.Linear, *_CONVOLUTIONS)) or isinstance(layer, torch.jit.ScriptModule):
        return False
    is_read = isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)  # by nn.MultiheadAttention
    weight = own_parameters(layer).get("weight")
    return plain_class_forward(layer) in _FORWARDS and not is_read and weight is not None and weight.is_floating_point()


def call_with(layer: nn.Module, input: Tensor, weight: Tensor) -> Tensor:
    """Return the output of a linear layer or convolution for another weight."""
    bias: Any = layer.bias
    return F.linear(input, weight, bias) if isinstance(layer, nn.Linear) else convolve_with(layer, input, weight, bias)


def avoid_fast_paths(model: nn.Module) -> list[RemovableHandle]:
    """Let each ``nn.TransformerEncoderLayer`` call its layers in evaluation, too, as it does if it has a hook."""
    found = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    return [module.register_forward_pre_hook(_do_nothing) for module in found]


def _do_nothing(module: nn.Module, arguments: Any) -> None:
    pass


def _run(layer: nn.Module, state: _State, original: Callable[..., Tensor], /, input: Tensor) -> Tensor:
    shared = state.shared
    if not shared.is_on:
        return original(input)
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


def _why_not(layer: nn.Module) -> str | None:
    return None if is_able(layer) else "it is no stock linear layer or convolution with a weight of its own"


def _range(layer: nn.Module) -> Tensor:
    """Return the range [2] of the inputs of a layer, float32, which may be written to."""
    return layer.get_buffer(RANGE).view(torch.float32)


_FORMAT = "lightning_vram quantized 1"
_KEY = "_lightning_vram_quantized"
_NAMES = _LEVELS, _SCALE, _INPUT = "weight_levels", "weight_scale", "input_range"


def save_quantized(module: nn.Module, quantization: FakeQuantization, path: str | PathLike[str]) -> None:
    """Write the state of ``module``, with quantized weights, for :func:`load_quantized`.

    Inputs of layers that have seen none are not rounded, unless ``quantization`` is dynamic.
    """
    state = dict(nn.Module.state_dict(module))  # complete: a module's own ``state_dict`` may leave out frozen weights
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
            weight = names[name].get_parameter("weight")
            levels, scale, _ = (state.pop(f"{name}.{key}", None) for key in _NAMES)
            state[f"{name}.weight"] = unpack(levels, scale, weight.shape, weight.dtype)
    else:
        in_float = {f"{name}.{key}" for name in saved["layers"] for key in (_SCALE, _INPUT)} & state.keys()
        state |= {key: state[key].view(torch.int32) for key in in_float}  # which ``to(bfloat16)`` keeps
        for layer, name in {names[name]: name for name in saved["layers"]}.items():
            _quantize(layer, *(state.get(f"{name}.{key}") for key in _NAMES), is_dynamic=saved["is_dynamic"])
        avoid_fast_paths(module)
    module.load_state_dict(state)
    return module.eval()


@dataclass(eq=False)
class _Stored:
    """State of a layer with a quantized weight, of ``shape``."""

    shape: torch.Size
    has_range: bool
    is_dynamic: bool


def _quantize(layer: nn.Module, levels: Tensor, scale: Tensor, known: Tensor | None, *, is_dynamic: bool) -> None:
    weight = own_parameters(layer).pop("weight")
    assert weight is not None
    stored = _Stored(weight.shape, has_range=known is not None, is_dynamic=is_dynamic)
    for name, value in zip(_NAMES, (levels, scale, known), strict=True):
        if value is not None:
            layer.register_buffer(name, torch.empty_like(value, device=weight.device))
    swap_class(layer, _KEY, stored, _run_stored, in_copies=True)


def _run_stored(layer: Any, stored: _Stored, original: Callable[..., Tensor], /, input: Tensor) -> Tensor:
    if input.numel() and (stored.has_range or stored.is_dynamic):
        input = round_input(input, layer.input_range.view(torch.float32) if stored.has_range else range_of(input))
    weight = unpack(layer.weight_levels, layer.weight_scale.view(torch.float32), stored.shape, input.dtype)
    return call_with(layer, input, weight)
