"""Compile backwards as they run uncompiled: without autocast."""

from contextlib import AbstractContextManager, nullcontext

from lightning_vram.core.surgery.held_setting import HeldSetting
from lightning_vram.private_names.torch.compiled import (
    has_backward_autocast,
    read_backward_autocast,
    set_backward_autocast,
)

_autocast = HeldSetting(read_backward_autocast, set_backward_autocast, value="off")


def compiled_backward_without_autocast() -> AbstractContextManager[None]:
    """Let what is compiled inside the block have a backward that does not autocast.

    By default PyTorch traces it under the autocast of the forward, so that float32 parts of a model have gradients in
    16 bit once they are compiled. What was compiled before stays as it is.
    """
    return _autocast.hold() if has_backward_autocast else nullcontext()
