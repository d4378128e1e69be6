"""Compile backwards as they run uncompiled: without autocast."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch._functorch import config

from lightning_vram.techniques.held_setting import HeldSetting

_NAME = "backward_pass_autocast"  # AOTAutograd's, not in all versions

_autocast = HeldSetting(partial(getattr, config, _NAME, None), partial(setattr, config, _NAME), value="off")


def compiled_backward_without_autocast() -> AbstractContextManager[None]:
    """Let what is compiled inside the block have a backward that does not autocast.

    By default PyTorch traces it under the autocast of the forward, so that float32 parts of a model have gradients in
    16 bit once they are compiled. What was compiled before stays as it is.
    """
    return _autocast.hold() if hasattr(config, _NAME) else nullcontext()
