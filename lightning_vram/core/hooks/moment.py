"""What runs in this thread: a backward, a transform, a selective checkpoint."""

import torch.utils.checkpoint

from lightning_vram.private_names.torch.autograd import current_graph_task_id, is_in_transform, is_tracing
from lightning_vram.private_names.torch.dispatch import current_dispatch_modes


class SelectiveCheckpointMode:
    """Base of our dispatch modes that save results for the recomputation, or return them in it."""


def is_in_backward() -> bool:
    """Whether autograd runs a backward."""
    return current_graph_task_id() != -1


def is_transformed() -> bool:
    """Whether ``torch.func`` or a tracer runs: neither knows the saved-tensor hooks that checkpoints consist of."""
    return is_in_transform() or is_tracing()


def is_in_selective_checkpoint() -> bool:
    """Whether results of operators are saved for, or read in, a recomputation, which must repeat the forward."""
    kinds = [kind for mode in current_dispatch_modes() for kind in type(mode).__mro__]
    # Ours, or one of PyTorch's own.
    return any(kind is SelectiveCheckpointMode or kind.__module__ == torch.utils.checkpoint.__name__ for kind in kinds)
