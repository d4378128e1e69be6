"""Hold a setting of the whole process at a value."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Generic, TypeVar

import torch

from lightning_vram.private_names.torch.compiled import (
    has_backward_autocast,
    read_backward_autocast,
    set_backward_autocast,
)

Setting = TypeVar("Setting")


class HeldSetting(Generic[Setting]):
    """A setting that several may hold at ``value``, in any order and thread: the last one puts it back."""

    def __init__(self, read: Callable[[], Setting], write: Callable[[Setting], None], value: Setting) -> None:
        self._read, self._write, self._value = read, write, value
        self._before = value
        self._num_holders = 0
        self._lock = threading.Lock()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold it inside the block."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> None:
        """Hold it from now on."""
        with self._lock:
            if self._num_holders == 0:
                self._before = self._read()
                self._write(self._value)
            self._num_holders += 1

    def release(self) -> None:
        """Hold it no longer, once for each :meth:`acquire`."""
        with self._lock:
            self._num_holders -= 1
            if self._num_holders == 0:
                self._write(self._before)


_fast_path = HeldSetting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, value=False)
_backward_autocast = HeldSetting(read_backward_autocast, set_backward_autocast, value="off")


def without_fast_path() -> AbstractContextManager[None]:
    """Let transformer layers call the layers that they consist of inside the block, in evaluations too.

    Their fast path reads the weights of those, past any ``forward``. PyTorch leaves it under the autocast of CUDA, and
    of no other device.
    """
    return _fast_path.hold()


def compiled_backward_without_autocast() -> AbstractContextManager[None]:
    """Let what is compiled inside the block have a backward that does not autocast, as in eager mode.

    By default PyTorch traces it under the autocast of the forward, so that float32 parts of a model have gradients in
    16 bit once they are compiled. What was compiled before stays as it is.
    """
    return _backward_autocast.hold() if has_backward_autocast else nullcontext()
