"""Load packed weights from checkpoints that have them packed, or in full."""

from typing import Any

from torch import Tensor, nn

from lightning_vram.techniques.quantize_frozen_weights.packing import Packing
from lightning_vram.techniques.quantize_frozen_weights.quantized_weight import QuantizedWeight


def load_packed(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: Any, *lists: list[str]
) -> None:
    """Before a layer is loaded: encode a weight that is a plain one into its bytes.

    Raises:
        ValueError: If it is packed in another way.
    """
    stand_in, given = vars(layer).get("weight"), state_dict.get(f"{prefix}weight")
    if not isinstance(stand_in, QuantizedWeight) or not isinstance(given, Tensor):
        return
    packed = stand_in.packed
    if given.shape == stand_in.shape and given.is_floating_point():
        stand_in.packing.encode(given, packed)
    elif given.shape != packed.shape or given.dtype != packed.dtype:
        found = Packing.of(given.shape, stand_in.numel()) if given.dtype == packed.dtype else None
        if found is not None:
            raise ValueError(
                f"the checkpoint has {prefix}weight in {_describe(found)}, and this run keeps it in "
                f"{_describe(stand_in.packing)}: set bits={found.bits}, block_size={found.block_size}."
            )
        lists[-1].append(
            f"size mismatch for {prefix}weight: copying a param with shape {given.shape} from checkpoint, the shape in "
            f"current model is {stand_in.shape}."
        )
    else:
        return
    state_dict[f"{prefix}weight"] = packed  # which is copied to itself


def _describe(packing: Packing) -> str:
    return f"{packing.bits} bits with block_size={packing.block_size}"
