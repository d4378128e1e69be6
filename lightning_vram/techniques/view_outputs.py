"""Let code after a sharded layer change its output in place, as it may without FSDP2."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._pytree import tree_map_only


class ViewProofState(FSDPState):
    """Takes the place of the class of FSDP2's object.

    FSDP2 gathers a layer's parameters for the backward in a hook on its output. Where that is a view, as that of a
    linear layer on more than two dimensions, an operator in place makes a new one without the hook; the tensor that
    is viewed keeps its own.
    """

    def _register_pre_backward_hook(self, output: Any) -> Any:
        is_transformed = getattr(torch._C, "_are_functorch_transforms_active", bool)
        if not torch.is_grad_enabled() or is_transformed():
            return super()._register_pre_backward_hook(output)
        super()._register_pre_backward_hook(tree_map_only(Tensor, _hold, output))
        return output


def _hold(tensor: Tensor) -> Tensor:
    base = tensor._base
    if base is None or not base.requires_grad or base.is_leaf:  # a parameter would collect hooks
        return tensor
    return base
