"""Put weights of frozen layers into 8 or 4 bits, layer by layer, and back."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_vram.core.layers.patterns import LayerPattern
from lightning_vram.core.layers.selection import name_layers
from lightning_vram.private_names.torch.modules import own_parameters
from lightning_vram.techniques.quantize_frozen_weights.libraries import Library
from lightning_vram.techniques.quantize_frozen_weights.loading import load_packed
from lightning_vram.techniques.quantize_frozen_weights.packing import Bits, Packing
from lightning_vram.techniques.quantize_frozen_weights.quantized_weight import (
    DTYPE,
    QuantizedWeight,
    quantized_weight,
)
from lightning_vram.techniques.quantize_frozen_weights.selection import find_able, find_named


def quantize_frozen_weights(
    model: nn.Module,
    bits: Bits = 8,
    block_size: int = 64,
    layers: LayerPattern | Sequence[LayerPattern] = "auto",
    *,
    library: Library = "own",
    give_memory: Callable[[nn.Module], object] | None = None,
) -> "QuantizedLayers":
    """Keep weights of frozen layers of ``model`` in few bits, until :meth:`QuantizedLayers.remove`.

    Linear layers, convolutions, embeddings and the ``Conv1D`` of transformers, and classes derived from them. The
    parameter keeps its name and becomes one of bytes (``uint8``); checkpoints may have either. Copies and pickles of a
    layer are quantized as well.

    Args:
        model: Any module. Layers of it that are quantized already stay so, and are taken over.
        bits: Of a number.
        block_size: Neighbours that share a float32 scale; a power of two.
        layers: ``"auto"``: all that are frozen and have 4096 numbers or more. Else what
            :func:`~lightning_vram.core.layers.selection.select_layers` knows: these, and what is frozen inside them.
        library: Whose kernels decode: ``"own"``, ``"bitsandbytes"``, or ``"auto"``: that one where it is installed
            and faster.
        give_memory: Called with a layer whose weight is on the meta device: gives it memory and values, or the layers
            have to be loaded later.

    Raises:
        ValueError: If a pattern matches nothing, or a layer that cannot be quantized.

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
    names = name_layers(model)
    chosen = find_able(model, names) if layers == "auto" else find_named(model, names, layers)
    for name, layer in chosen.items():
        known = quantized_weight(layer)
        if known is not None and known.packing != packing:
            raise ValueError(f"{name!r} is kept in {known.packing} already, which is not {packing}.")
    quantized = QuantizedLayers()
    done: dict[int, nn.Parameter] = {}
    try:
        for name, layer in chosen.items():
            quantized.layers[name] = layer
            if quantized_weight(layer) is None:
                _quantize(layer, name, packing, done, give_memory)
            vars(layer)["weight"].library = library
    except BaseException:
        quantized.remove()
        raise
    return quantized


class QuantizedLayers:
    """Layers whose weights are kept in few bits."""

    def __init__(self) -> None:
        self.layers: dict[str, nn.Module] = {}

    @property
    def names(self) -> list[str]:
        """Of the layers."""
        return list(self.layers)

    def weights(self) -> Iterator[QuantizedWeight]:
        """Yield the weights, one that several layers have once."""
        seen: set[int] = set()
        for layer in self.layers.values():
            weight = quantized_weight(layer)
            if weight is not None and id(weight.packed) not in seen:
                seen.add(id(weight.packed))
                yield weight

    def remove(self) -> None:
        """Give the layers plain weights again, on the host, one after the other: what was decoded all the time.

        What is sharded stays as it is.
        """
        done: dict[int, nn.Parameter] = {}
        with torch.no_grad():
            while self.layers:
                _, layer = self.layers.popitem()
                weight = quantized_weight(layer)
                if weight is None or weight.is_sharded:
                    continue
                if id(weight.packed) not in done:
                    done[id(weight.packed)] = nn.Parameter(
                        weight.dequantize(weight.own_dtype).cpu(), requires_grad=False
                    )
                _restore(layer, done[id(weight.packed)])


@torch.no_grad()
def _quantize(
    layer: nn.Module,
    name: str,
    packing: Packing,
    done: dict[int, nn.Parameter],
    give_memory: Callable[[nn.Module], object] | None,
) -> None:
    """Put the bytes of a weight in its place, the same for all layers that share it."""
    parameters = own_parameters(layer)
    weight = parameters["weight"]
    assert weight is not None
    shape, dtype = weight.shape, weight.dtype
    if id(weight) not in done:
        if weight.is_meta and give_memory is not None:
            give_memory(layer)  # the parameter is still the same object
        done[id(weight)] = nn.Parameter(_pack(weight, packing), requires_grad=False)
    packed = done[id(weight)]
    layer.register_buffer(DTYPE, torch.empty(0, dtype=dtype, device=packed.device), persistent=False)
    parameters["weight"] = packed
    loading = layer.register_load_state_dict_pre_hook(load_packed)  # type: ignore[no-untyped-call]
    vars(layer)["weight"] = QuantizedWeight(layer, name, packing, shape, loading)  # found before parameters are


def _pack(weight: Tensor, packing: Packing) -> Tensor:
    if weight.is_meta:
        return packing.empty(weight.numel(), torch.device("cpu")).zero_()  # until they are loaded
    packed = packing.empty(weight.numel(), weight.device)
    packing.encode(weight, packed)
    return packed


def _restore(layer: nn.Module, weight: nn.Parameter) -> None:
    vars(layer).pop("weight").loading.remove()
    delattr(layer, DTYPE)
    own_parameters(layer)["weight"] = weight
