"""Make an FSDP2 model usable again after a forward or backward that failed.

An exception leaves parameters gathered, collectives under way and FSDP2's own bookkeeping in the middle of things.
PyTorch 2.13 can reset these, but not all: gradients of whole parameters that were not yet reduced stay and would be
added to those of the next backward, and of a layer whose gathering itself ran out of memory the buffers stay.
"""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

if dist.is_available():
    from torch.distributed.fsdp import FSDPModule  # absent from builds without torch.distributed


def can_recover() -> bool:
    """Whether this PyTorch can reset FSDP2 after an exception: 2.13 or newer."""
    return dist.is_available() and hasattr(FSDPModule, "reset_iter_state")


def is_sharded(module: nn.Module) -> bool:
    """Whether there are FSDP2 modules in ``module``."""
    return next(_states(module), None) is not None


def discard_failed_iteration(module: nn.Module) -> None:
    """Bring all FSDP2 models in ``module`` to where they were before a forward or backward that failed.

    To be called outside of the ``except`` block, when nothing holds the graph any more, and on every rank: all must
    have failed or given up at the same collective, since the others wait there. Afterwards parameters are sharded and
    nothing is gathered. Gradients that were accumulated unreduced (``set_requires_gradient_sync(False)``) are lost,
    those of earlier batches too. Gradients of the shards are left as they are: some parameters have that of the failed
    backward in them by now, so save them before and put them back.

    Args:
        module: An FSDP2 model, a module that contains some, or none: then nothing happens.

    Raises:
        RuntimeError: If this PyTorch cannot do it, or ``module`` is only a part of an FSDP2 model.
    """
    states = list(_states(module))
    if not states:
        return
    if not can_recover():
        raise RuntimeError(
            "An FSDP2 model cannot go on after a failed forward or backward before PyTorch 2.13: "
            "upgrade, or choose a size that fits from the start."
        )
    roots = [part for part, state in states if state._is_root]
    if not roots and any(state._is_root is False for _, state in states):
        raise RuntimeError(
            f"discard_failed_iteration(module) needs the whole FSDP2 model, got a part of one: {type(module).__name__}."
        )
    for root in roots:
        root.reset_iter_state()
    for _, state in states:
        for parameter in _sharded_parameters(state):
            _discard(parameter)


def _states(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    if dist.is_available():
        for part in module.modules():
            if isinstance(part, FSDPModule):
                yield part, part._get_fsdp_state()


def _sharded_parameters(state: Any) -> Iterator[Any]:
    for group in state._fsdp_param_groups:
        yield from group.fsdp_params


def _discard(parameter: Any) -> None:
    """Drop the unreduced gradients of a parameter, and buffers it was to be gathered in."""
    whole = getattr(parameter, "_unsharded_param", None)  # made by its first gathering
    if whole is not None:
        whole.grad = None
    parameter.unsharded_accumulated_grad = None
    if parameter.grad_offload_event is not None:  # the copy to the host must not write over what the caller restores
        parameter.grad_offload_event.synchronize()
        parameter.grad_offload_event = None
    parameter.free_unsharded_param()
