"""What is going on in this thread: a backward, a transform, a checkpoint that keeps results of operators."""

import torch.utils.checkpoint

from lightning_vram.private_names.torch.autograd import current_graph_task_id, is_in_transform, is_tracing
from lightning_vram.private_names.torch.dispatch import TorchDispatchMode, current_dispatch_modes


class SelectiveCheckpointMode:
    """What our dispatch modes derive from that keep results for a second run, or hand them out in it."""


def is_in_backward() -> bool:
    """Whether autograd runs a backward."""
    return current_graph_task_id() != -1


def is_transformed() -> bool:
    """Whether ``torch.func`` or a tracer is at work: neither knows the saved-tensor hooks checkpoints are made of."""
    return is_in_transform() or is_tracing()


def is_in_selective_checkpoint() -> bool:
    """Whether results of operators are kept for, or taken in, a second run, which has to do what the first did."""
    return any(map(_is_of_selective_checkpoint, current_dispatch_modes()))


def _is_of_selective_checkpoint(mode: TorchDispatchMode) -> bool:
    if isinstance(mode, SelectiveCheckpointMode):
        return True
    return any(kind.__module__ == torch.utils.checkpoint.__name__ for kind in type(mode).__mro__)  # PyTorch's own
