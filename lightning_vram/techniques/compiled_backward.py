"""Compile backwards as they run uncompiled: without autocast."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch._functorch import config

_SETTING = "backward_pass_autocast"  # AOTAutograd's, not in all versions


@contextmanager
def compiled_backward_without_autocast() -> Iterator[None]:
    """Let what is compiled inside the block have a backward that does not autocast.

    By default PyTorch traces it under the autocast of the forward, so that float32 parts of a model have gradients in
    16 bit once they are compiled. What was compiled before stays as it is.
    """
    if not hasattr(config, _SETTING):
        yield
        return
    before = getattr(config, _SETTING)
    setattr(config, _SETTING, "off")
    try:
        yield
    finally:
        setattr(config, _SETTING, before)
