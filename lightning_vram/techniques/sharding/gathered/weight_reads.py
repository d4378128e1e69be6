"""What is done with a gathered weight: whether it would do to have it in 16 bit.

Autocast casts the weight of a linear layer at each use. A weight that comes in 16 bit gives the same bits, if nothing
but autocast reads its values, and if no backward adds up the gradients of several uses: a plain run does so in 32 bit.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.tensors.parameter_classes import OURS, add_parameter_class
from lightning_vram.private_names.torch.autograd import current_graph_task_id
from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.private_names.torch.trees import tree_leaves
from lightning_vram.techniques.sharding.gathered.settable_shards import GatheredParameter

_READS = f"{OURS}reads"
_CASTING = frozenset(
    {
        F.linear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        F.multi_head_attention_forward,
        torch.addmm,  # of transformers' Conv1D
    }
)
_PROPERTIES: Any = Tensor
_HARMLESS = frozenset(
    {
        *(_PROPERTIES.grad.__get__, _PROPERTIES.grad.__set__, _PROPERTIES.grad_fn.__get__),
        *(_PROPERTIES.requires_grad.__set__, Tensor.requires_grad_),
    }
)
# Compares dtypes to choose a path that it does not take under autocast.
_ATTENTION = nn.MultiheadAttention.forward.__code__
# What is no value of the weight, such as its shape. Not its dtype: what is cast to that has other bits.
_FACTS = (int, str, torch.device, torch.layout, RemovableHandle)


class WeightReads:
    """Of one weight, counted until the end of a backward."""

    def __init__(self) -> None:
        self.is_used = False
        self.needs_width = False
        self._num_uses = [0, 0]  # before the backward, and in it, where checkpoints compute again

    def note(self, weight: Tensor, func: Any, result: Any) -> None:
        """Note a function of the weight and what it returned."""
        if func in _CASTING:
            self.is_used = True
            self.needs_width |= not torch.is_autocast_enabled(weight.device.type)
            self._num_uses[current_graph_task_id() != -1] += torch.is_grad_enabled() and weight.requires_grad
        elif func not in _HARMLESS and not _is_asked_by_attention(func):
            self.needs_width |= not all(isinstance(leaf, _FACTS) for leaf in tree_leaves(result))

    def end_backward(self) -> None:
        """Take the uses of this backward into account."""
        self.needs_width |= max(self._num_uses) > 1
        self.forget_uses()

    def forget_uses(self) -> None:
        """Begin to count anew."""
        self._num_uses = [0, 0]


def _is_asked_by_attention(func: Any) -> bool:
    """Whether torch's own attention asks for the dtype of a weight: it called who called :meth:`WeightReads.note`."""
    return func == _PROPERTIES.dtype.__get__ and sys._getframe(3).f_code is _ATTENTION


class ObservedParameter(GatheredParameter):
    """What the class of a gathered weight is while it is on trial: the same results, some microseconds later."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as without it, whatever other classes of tensors are there, and take a note."""
        weights = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is ObservedParameter]
        for weight in weights:
            weight.__class__ = GatheredParameter  # type: ignore[assignment]
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            for weight in weights:
                weight.__class__ = ObservedParameter
        for weight in weights:
            vars(weight)[_READS].note(weight, func, result)
        return result


add_parameter_class(ObservedParameter)


def observe(weight: Any, reads: WeightReads | None) -> None:
    """Let ``reads`` hear of all that is done with what is gathered; ``None``: nobody.

    Of a fake tensor, which cannot change its class, it hears that autocast casts it.
    """
    if isinstance(weight, FakeTensor):
        if reads is not None:
            reads.is_used = True
        return
    if type(weight) in (nn.Parameter, GatheredParameter, ObservedParameter):  # else it refuses writes
        weight.__class__ = GatheredParameter if reads is None else ObservedParameter
        vars(weight)[_READS] = reads
