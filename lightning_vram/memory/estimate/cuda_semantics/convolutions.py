"""Memory format of a convolution's result as cuDNN gives it: channels last as soon as the input or the weight is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_vram.memory.estimate.replaced import replaced
from lightning_vram.private_names.cuda.backends import CONVOLUTION_FORMAT

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@contextmanager
def convolutions_of(kind: str) -> Iterator[None]:
    """Let fake convolutions on devices of ``kind`` have results in cuDNN's format, inside the block."""
    owner, name = CONVOLUTION_FORMAT
    original: Callable[..., Any] = getattr(owner, name)

    def memory_format(x: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
        return _cudnn_format(x, weight) if x.device.type == kind else original(x, weight, backend)

    with replaced(owner, {name: memory_format}):
        yield


def _cudnn_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    channels_last = _CHANNELS_LAST.get(weight.dim())
    is_double = torch.float64 in (x.dtype, weight.dtype)
    if channels_last is None or is_double or not any(_is_laid_out(t, channels_last) for t in (x, weight)):
        return torch.contiguous_format
    return channels_last


def _is_laid_out(tensor: Tensor, layout: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()
