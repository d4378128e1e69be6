"""Quantize weights of frozen layers to 8 or 4 bits, layer by layer, and dequantize them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_vram.core.layers import LayerPattern, choose_able, name_layers
from lightning_vram.core.tensors.properties import PARAMETER_CLASSES
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.private_names.torch import own_buffers, own_parameters
from lightning_vram.techniques.quantize_frozen_weights.packing import Bits, Library, Packing
from lightning_vram.techniques.quantize_frozen_weights.quantized_weight import (
    DTYPE,
    LOADING,
    NO_MEMORY,
    Form,
    QuantizedParameter,
    QuantizedWeight,
    make_weight,
    quantized_weight,
)

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


def why_not(layer: nn.Module) -> str | None:
    """Return why the weight of ``layer`` cannot be quantized; ``None`` if it can, or is already."""
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
    if (reason := _why_not_weight(weight)) is not None:
        return reason
    if isinstance(layer, _READ_FROM_OUTSIDE):
        return "nn.MultiheadAttention reads its weight without calling it"
    has_max_norm = isinstance(layer, nn.Embedding) and layer.max_norm is not None
    return "its max_norm writes to its weight" if has_max_norm else None


def _why_not_weight(weight: Tensor) -> str | None:
    if weight.requires_grad:
        return "its weight is trained: freeze it with requires_grad_(False), or name other layers"
    if isinstance(weight, DTensor) and weight.dtype in _DTYPES and weight.numel() >= MIN_NUMBERS:
        return _LATE
    if type(weight) not in PARAMETER_CLASSES or weight.dtype not in _DTYPES or weight.layout is not torch.strided:
        return f"its weight is a {type(weight).__name__} of {weight.dtype}"
    return f"its weight has fewer than {MIN_NUMBERS} numbers" if weight.numel() < MIN_NUMBERS else None


def quantize_frozen_weights(  # noqa: PLR0913 - by name
    model: nn.Module,
    bits: Bits = 8,
    block_size: int = 64,
    layers: LayerPattern | Sequence[LayerPattern] = "auto",
    *,
    library: Library = "own",
    give_memory: Callable[[nn.Module], object] | None = None,
    device: torch.device | None = None,
) -> "QuantizedLayers":
    """Quantize weights of frozen layers of ``model``, until :meth:`QuantizedLayers.remove`.

    Linear layers, convolutions, embeddings and transformers' ``Conv1D``, and classes derived from them. The parameter
    keeps its name, and reads as its dequantized values; it and checkpoints hold bytes (``uint8``). Checkpoints with
    ordinary weights load as well. Layers of ``model`` that are quantized already are included.

    Args:
        model: Any module.
        bits: Bits per number.
        block_size: Neighbours that share a float32 scale; a power of two.
        layers: ``"auto"``: all frozen ones of 4096 numbers or more. Else these, and what is frozen inside them.
        library: Whose kernels dequantize; ``"auto"``: bitsandbytes where it is installed and faster.
        give_memory: Called with a layer on the meta device, to load it; else it must be loaded later.
        device: Quantizes weights in parts; the bytes go to the device of the weight. ``None``: that one quantizes.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_vram.techniques.quantize_frozen_weights import quantize_frozen_weights
        >>> model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 2))
        >>> quantized = quantize_frozen_weights(model, bits=4)
        >>> (quantized.names, model[0].weight.packed.nbytes)
        (['0'], 2304)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> quantized.remove()
    """
    packing = Packing(bits, block_size)
    late = next((name for name, layer in name_layers(model).items() if why_not(layer) == _LATE), None)
    if late is not None and layers == "auto":
        raise ValueError(f"{late!r} cannot be quantized: {_LATE}.")
    chosen = choose_able(model, layers, why_not)
    for name, layer in chosen.items():
        known = quantized_weight(layer)
        if known is not None and known.form.packing != packing:
            raise ValueError(f"{name!r} is quantized in {known.form.packing} already, got {packing}.")
    quantized = QuantizedLayers()
    done: dict[int, nn.Parameter] = {}
    try:
        for name, layer in chosen.items():
            quantized.layers[name] = layer
            if (weight := quantized_weight(layer)) is None:
                weight = _quantize(layer, name, packing, device, done, give_memory)
            weight.form.library = library
    except BaseException:
        quantized.remove()
        raise
    return quantized


def dequantize_frozen_weights(model: nn.Module) -> list[str]:
    """Dequantize frozen weights of ``model`` in place; the values are those that the layers computed with.

    Use it after ``QuantizeFrozenWeights(keep=True)``, before code that writes to weights, such as ``merge_and_unload``
    of peft.

    Args:
        model: Any module.

    Returns:
        The names of the dequantized layers.

    Raises:
        ValueError: If a weight is sharded: this rank has only a shard of it.

    Example:
        >>> from torch import nn
        >>> from lightning_vram.techniques.quantize_frozen_weights import quantize_frozen_weights
        >>> model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
        >>> names = quantize_frozen_weights(model).names
        >>> dequantize_frozen_weights(model)
        ['0']
    """
    quantized = QuantizedLayers()
    quantized.layers = {name: one for name, one in name_layers(model).items() if quantized_weight(one) is not None}
    if any(weight.is_sharded for weight in quantized.weights()):
        raise ValueError("quantized weights are sharded: load a checkpoint of state_dict_type='full' without shards.")
    names = quantized.names
    quantized.remove(to_host=False)
    return names


class QuantizedLayers:
    """Layers with quantized weights."""

    def __init__(self) -> None:
        self.layers: dict[str, nn.Module] = {}

    @property
    def names(self) -> list[str]:
        """Names of the layers."""
        return list(self.layers)

    def weights(self) -> list[QuantizedWeight]:
        """Return the weights, shared ones once."""
        weights = [weight for layer in self.layers.values() if (weight := quantized_weight(layer)) is not None]
        return list({id(weight.held): weight for weight in weights}.values())

    def remove(self, *, to_host: bool = True) -> None:
        """Dequantize the weights, except sharded ones, one by one; to the host, or on the device of the layer."""
        done: dict[int, nn.Parameter] = {}
        with torch.no_grad():
            while self.layers:
                _, layer = self.layers.popitem()
                weight = quantized_weight(layer)
                if weight is None or weight.is_sharded:
                    continue
                held = id(weight.held)
                if held not in done:
                    dtype, packed = weight.form.own_dtype, weight.packed
                    if to_host and isinstance(packed, FakeTensor):  # an estimate leaves the module on its device
                        value: Tensor = packed.new_empty(weight.form.shape, dtype=dtype, device="cpu")
                    else:
                        value = weight.dequantize(dtype)
                    done[held] = nn.Parameter(value.cpu() if to_host else value, requires_grad=False)
                vars(layer).pop(LOADING).remove()
                vars(layer).pop("weight", None)
                delattr(layer, DTYPE)
                own_parameters(layer)["weight"] = done[held]


@torch.no_grad()
def _quantize(
    layer: nn.Module,
    name: str,
    packing: Packing,
    device: torch.device | None,
    done: dict[int, nn.Parameter],
    give_memory: Callable[[nn.Module], object] | None,
) -> QuantizedWeight:
    """Replace a weight by its bytes, the same for all layers in ``done`` that share it."""
    parameters, buffers = own_parameters(layer), own_buffers(layer)
    weight = parameters["weight"]
    assert weight is not None
    vars(layer)[LOADING] = layer.register_load_state_dict_pre_hook(_load_packed)  # type: ignore[no-untyped-call]
    form = Form(name, packing, weight.shape, buffers)
    if id(weight) not in done:
        if weight.is_meta and give_memory is not None:
            give_memory(layer)  # the parameter is still the same object
        packed = packing.empty(weight.numel(), torch.device("cpu") if weight.is_meta else weight.device)
        if weight.is_meta:
            packed.zero_()  # until they are loaded
        else:
            packing.encode(weight, packed, device)
        done[id(weight)] = make_weight(QuantizedParameter, packed, {"form": form})
    carrier = torch.empty(0, dtype=weight.dtype, device=done[id(weight)].device)
    layer.register_buffer(DTYPE, carrier, persistent=False)
    parameters["weight"] = done[id(weight)]
    attribute: QuantizedWeight = make_weight(QuantizedWeight, NO_MEMORY, {"form": form, "parameters": parameters})
    vars(layer)["weight"] = attribute  # found before parameters are
    return attribute


def _load_packed(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: Any, *lists: list[str]
) -> None:
    """Before a layer is loaded: quantize an ordinary weight into the layer's bytes."""
    weight, given = quantized_weight(layer), state_dict.get(f"{prefix}weight")
    if weight is None or not isinstance(given, Tensor):
        return
    packed, form = weight.packed, weight.form
    if given.shape == form.shape and given.is_floating_point():
        form.packing.encode(given, packed, packed.device)
    elif given.shape != packed.shape or given.dtype != packed.dtype:
        lists[-1].append(
            f"size mismatch for {prefix}weight: copying a {given.dtype} of shape {given.shape} from checkpoint, "
            f"the shape in current model is {form.shape}, or {packed.shape} quantized with bits={form.packing.bits}, "
            f"block_size={form.packing.block_size}. A quantized checkpoint needs the same bits and block_size."
        )
    else:
        packed.copy_(given)
    state_dict[f"{prefix}weight"] = weight.held  # loading copies it to itself
