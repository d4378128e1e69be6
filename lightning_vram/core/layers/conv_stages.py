"""Find convolution-norm-activation stages, as VGG networks have."""

from collections.abc import Iterator
from typing import TypeGuard

from torch import nn
from torch.nn.modules import activation, dropout, normalization, pooling

from lightning_vram.private_names.torch.modules import ConvBase, InstanceNormBase, NormBase

_NORMS = (
    NormBase,
    InstanceNormBase,
    normalization.GroupNorm,
    normalization.LayerNorm,
    normalization.LocalResponseNorm,
)


def find_conv_stages(module: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield the stages of a stock ``nn.Sequential`` as (first child, one after the last child).

    A stage is a convolution, at least one normalisation, at least one activation, and the dropout and pooling layers
    among and right after them, so that its output is as small as possible.
    """
    if not is_stock_sequential(module):
        return
    children = list(module)
    starts = [index for index, child in enumerate(children) if isinstance(child, ConvBase)]
    for start in starts:
        stop = start + 1
        while stop < len(children) and _follows(children[stop]):
            stop += 1
        run = children[start:stop]
        if any(isinstance(child, _NORMS) for child in run) and any(_is_activation(child) for child in run):
            yield start, stop


def is_stock_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether ``module`` is an ``nn.Sequential`` with the stock ``forward``."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    return "forward" not in vars(module)  # set on the instance: it may do anything


def _follows(child: nn.Module) -> bool:
    return isinstance(child, _NORMS) or _is_activation(child) or _is_in(child, dropout) or _is_in(child, pooling)


def _is_activation(child: nn.Module) -> bool:
    return _is_in(child, activation) and not isinstance(child, nn.MultiheadAttention)


def _is_in(child: nn.Module, family: object) -> bool:
    return any(base.__module__ == getattr(family, "__name__", None) for base in type(child).__mro__)
