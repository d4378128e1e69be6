"""Fold batch norms with frozen statistics into the convolutions before them, on the fly and from the live parameters.

The convolution's own output, which the norm would save for backward, never exists. Autograd differentiates through the
folding, so both modules train on ("Tune mode", https://arxiv.org/abs/2305.11624). Equal up to rounding. Autograd saves
the folded weights unless they are recomputed: without recomputation, small batches use more memory, not less. Calls
with the norm in training mode run unchanged.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_vram.core.patching import Swaps, plain_class_forward
from lightning_vram.core.tensors.properties import PLAIN_TYPES, version_of
from lightning_vram.private_names.torch import (
    can_check_dimensions,
    can_pad_output,
    check_dimensions,
    class_conv_forward,
    convolve_with,
    current_graph_task_id,
    is_in_transform,
)
from lightning_vram.private_names.torch import output_padding as find_output_padding
from lightning_vram.techniques.in_place_fusion.observed_links import Link

_Convolution: TypeAlias = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
)
_Norm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_STATE = "_frozen_batch_norm_folding"
_TRANSPOSED: tuple[Callable[..., Tensor], ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_TRANSPOSED_FORWARDS = {kind.forward for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)}
_CONV_METHODS = {(kind.forward, class_conv_forward(kind)) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}
_NORM_FORWARDS = {kind.forward for kind in BATCH_NORMS}


@dataclass(eq=False)
class _Folding:
    """What both modules of a pair carry, in their ``__dict__``."""

    convolution: _Convolution
    norm: _Norm
    output: "tuple[weakref.ref[torch.UntypedStorage], int] | None" = None  # what the convolution made last, and version

    def is_possible_now(self) -> bool:
        """Whether the norm is frozen and both are as they were. Both modules ask it, and must hear the same."""
        norm, convolution = self.norm, self.convolution
        if norm.training or norm.running_mean is None or norm.running_var is None:
            return False
        tensors = (convolution.weight, convolution.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var)
        return all(tensor is None or type(tensor) in PLAIN_TYPES for tensor in tensors)  # sharded ones: elsewhere

    def is_other(self, input: Tensor) -> bool:
        """Whether ``input`` is certainly not what the convolution made for the norm."""
        if self.output is None or current_graph_task_id() != -1:
            return False  # compiled code and transforms; a checkpoint, which runs the norm again on what it saved
        storage, version = self.output
        return storage() is not input.untyped_storage() or version != version_of(input)

    def end_step(self) -> bool:
        """Forget the last output. Returns whether the norm did not get it."""
        was_lost, self.output = self.output is not None, None
        return was_lost


class FoldingHandle(Swaps):
    """Undoes :func:`fold_frozen_batch_norm`."""

    def __init__(self, num_folded: int) -> None:
        super().__init__(_STATE)
        self.num_folded = num_folded
        self._foldings: list[_Folding] = []

    def end_step(self) -> bool:
        """Return whether, since the last call, a convolution's output did not go to its norm alone and first."""
        return sum(folding.end_step() for folding in self._foldings) > 0  # all of them are asked


def fold_frozen_batch_norm(links: Sequence[Link]) -> FoldingHandle:
    """Let convolutions do the work of the frozen batch norms that follow them; return the undo.

    A call folds if the norm is in evaluation mode then; ``state_dict`` keys, parameters, copies and pickles stay those
    of the original modules. Only the norm may read the convolution's output, which ``LinkObserver`` proves. Raises
    ``ValueError`` if a pair cannot be folded (:func:`why_not_folded`); all modules are then as they were.

    Example:
        >>> conv, norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4).eval()
        >>> handle = fold_frozen_batch_norm([Link(conv, norm)])
        >>> output = conv(torch.ones(1, 3, 2, 2))
        >>> norm(output) is output
        True
        >>> handle.remove()
    """
    handle = FoldingHandle(len(links))
    with handle.all_or_none():
        for link in links:
            reason = why_not_folded(link)
            if reason is not None:
                pair = f"{type(link.producer).__name__} -> {type(link.consumer).__name__}"
                raise ValueError(f"{pair} cannot be folded: {reason}.")
            folding = _Folding(link.producer, link.consumer)  # type: ignore[arg-type]
            handle._foldings.append(folding)
            for module, run in ((link.producer, _run_convolution), (link.consumer, _run_norm)):
                handle.add(module, folding, run)
    return handle


def why_not_folded(link: Link) -> str | None:
    """Return why ``link`` can never be folded, as words after "because"; ``None`` if it can."""
    convolution, norm = link.producer, link.consumer
    if _STATE in vars(convolution) or _STATE in vars(norm):
        return "one of them is folded already"
    if not isinstance(convolution, CONVOLUTIONS) or not _is_stock(convolution):
        return "the first is not a stock convolution"
    if not isinstance(norm, BATCH_NORMS) or not _is_stock(norm):
        return "the second is not a stock batch norm"
    if norm.running_mean is None or norm.running_var is None:
        return "the norm has no running statistics"
    if norm.num_features != convolution.out_channels:
        return f"the norm has {norm.num_features} channels, the convolution {convolution.out_channels}"
    return None


def _is_stock(module: nn.Module) -> bool:
    if "forward" in vars(module) or is_parametrized(module):  # set on the instance: it may do anything
        return False
    kind, forward = type(module), plain_class_forward(module)
    if isinstance(module, BATCH_NORMS):
        return forward in _NORM_FORWARDS
    if forward in _TRANSPOSED_FORWARDS:
        return can_pad_output(kind)
    return (forward, class_conv_forward(kind)) in _CONV_METHODS


def _run_convolution(
    module: nn.Module, folding: _Folding, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    is_own = module is folding.convolution  # else DataParallel's copy, with weights of its own
    if is_own:
        folding.output = None
    if not is_own or not folding.is_possible_now():
        return original(*args, **kwargs)
    output = _convolve(folding.convolution, *_fold(folding.convolution, folding.norm), *args, **kwargs)
    if not torch.compiler.is_compiling() and not is_in_transform():
        folding.output = weakref.ref(output.untyped_storage()), version_of(output)
    return output


def _run_norm(module: nn.Module, folding: _Folding, original: Callable[..., Any], /, input: Tensor) -> Any:
    if module is not folding.norm or not folding.is_possible_now():
        return original(input)
    if not torch.compiler.is_compiling() and folding.is_other(input):
        raise RuntimeError(
            "a batch norm that is folded into its convolution got another tensor than the convolution's output: the "
            "model took another path than in the observed step. Do not fold this pair."
        )
    folding.output = None
    if can_check_dimensions(folding.norm):
        check_dimensions(folding.norm, input)
    return input


def _fold(convolution: _Convolution, norm: _Norm) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias that do what both modules do. Computed in float32 at least."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    weight, bias = convolution.weight, convolution.bias
    dtype = torch.promote_types(weight.dtype, torch.float32)
    scale = torch.rsqrt(norm.running_var.to(dtype) + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.to(dtype)
    mean = norm.running_mean.to(dtype)
    shift = (bias.to(dtype) - mean if bias is not None else -mean) * scale
    if norm.bias is not None:
        shift = shift + norm.bias.to(dtype)
    folded = weight.to(dtype) * _spread(scale, convolution)
    return folded.to(weight.dtype), shift.to(weight.dtype)


def _spread(scale: Tensor, convolution: _Convolution) -> Tensor:
    """Give the scale of the output channels the dimensions of the weight."""
    ones = (1,) * len(convolution.kernel_size)
    if not convolution.transposed:
        return scale.view(-1, 1, *ones)
    if convolution.groups == 1:
        return scale.view(1, -1, *ones)
    # [in, out / groups, ...]: the rows of a group reach the channels of that group
    rows = convolution.in_channels // convolution.groups
    return scale.view(convolution.groups, 1, -1).expand(-1, rows, -1).reshape(convolution.in_channels, -1, *ones)


def _convolve(
    convolution: Any, weight: Tensor, bias: Tensor, /, input: Tensor, output_size: list[int] | None = None
) -> Tensor:
    if not convolution.transposed:
        return convolve_with(convolution, input, weight, bias)
    stride, padding, dilation = convolution.stride, convolution.padding, convolution.dilation
    sizes = (convolution.kernel_size, len(convolution.kernel_size), dilation)
    output_padding = find_output_padding(convolution, input, output_size, stride, padding, *sizes)
    transposed = _TRANSPOSED[len(convolution.kernel_size) - 1]
    return transposed(input, weight, bias, stride, padding, output_padding, convolution.groups, dilation)
