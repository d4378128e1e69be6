"""What CUDA's allocator holds, block by block."""

from typing import Any

import torch


def read_snapshot() -> dict[str, Any] | None:
    """Return the allocator's state, or ``None`` where there is none to be had."""
    read: Any = getattr(torch.cuda.memory, "_snapshot", None)
    if read is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    snapshot: dict[str, Any] = read()
    return snapshot
