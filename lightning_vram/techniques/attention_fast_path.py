"""Let transformer layers call the layers that they are made of, in evaluations too.

Their fast path reads the weights of those, past any ``forward``. PyTorch leaves it under the autocast of CUDA, and of
no other device.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_num_users = 0  # threads share the setting
_was_enabled = True


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Keep it off inside the block."""
    global _num_users, _was_enabled
    with _lock:
        if _num_users == 0:
            _was_enabled = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(value=False)
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if _num_users == 0:
                torch.backends.mha.set_fastpath_enabled(value=_was_enabled)
