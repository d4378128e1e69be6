"""Let transformer layers call the layers that they are made of, in evaluations too.

Their fast path reads the weights of those, past any ``forward``. PyTorch leaves it under the autocast of CUDA, and of
no other device.
"""

from contextlib import AbstractContextManager

import torch

from lightning_vram.core.surgery.held_setting import HeldSetting

_fast_path = HeldSetting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, value=False)


def without_fast_path() -> AbstractContextManager[None]:
    """Keep it off inside the block."""
    return _fast_path.hold()
