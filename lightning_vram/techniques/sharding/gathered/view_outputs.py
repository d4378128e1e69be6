"""Let code after a sharded layer change its output in place, as it may without FSDP2."""

from typing import Any

from torch import Tensor

from lightning_vram.private_names.fsdp2.classes import StateBase
from lightning_vram.private_names.torch.tensors import base_of
from lightning_vram.private_names.torch.trees import tree_map_only


class ViewProofState(StateBase):
    """Takes the place of the class of FSDP2's object.

    FSDP2 gathers a layer's parameters for the backward in a hook on its output. Where that is a view, as that of a
    linear layer on more than two dimensions, an operator in place makes a new one without the hook; the tensor that
    is viewed keeps its own.
    """

    def find_hooked(self, output: Any) -> Any:
        """Return ``output`` with what is viewed in place of the views."""
        return tree_map_only(Tensor, _hold, output)


def _hold(tensor: Tensor) -> Tensor:
    base = base_of(tensor)
    if base is None or not base.requires_grad or base.is_leaf:  # a parameter would collect hooks
        return tensor
    return base
