"""Make an FSDP2 model usable again after a forward or backward that failed.

An exception leaves parameters gathered, collectives under way and FSDP2's own bookkeeping in the middle of things.
PyTorch 2.13 can reset these, but not all: gradients of whole parameters that were not yet reduced stay (up to 2.14) and
would be added to those of the next backward, and of a layer whose gathering itself ran out of memory the buffers stay.
"""

from torch import nn

from lightning_vram.core.tensors.shards import sharded_modules
from lightning_vram.private_names.fsdp2.states import can_reset, discard_step, groups_of, is_root

can_recover = can_reset
"""Return whether this PyTorch can reset FSDP2 after an exception: 2.13 or newer."""


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
    parts = list(sharded_modules(module))
    if not parts:
        return
    if not can_recover():
        raise RuntimeError(
            "An FSDP2 model cannot continue after a failed forward or backward before PyTorch 2.13: "
            "upgrade, or choose a size that fits from the start."
        )
    roots = [part for part in parts if is_root(part)]
    if not roots and any(is_root(part) is False for part in parts):
        raise RuntimeError(
            f"discard_failed_iteration(module) needs the whole FSDP2 model, got a submodule: {type(module).__name__}."
        )
    for root in roots:
        root.reset_iter_state()
    for parameter in (p for part in parts for group in groups_of(part) for p in group.fsdp_params):
        discard_step(parameter)
