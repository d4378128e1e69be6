"""What compressing one run came to."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class CompressionReport:
    """What one run saved for its backward. Memory that several tensors share counts once."""

    saved_bytes: int = 0
    """Bytes that plain autograd would have kept, parameters and buffers not counted."""
    kept_bytes: int = 0
    num_saved: int = 0
    """Tensors that autograd asked to keep."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Encodings by kind: ``"mask"``, ``"two values"``, ``"indices"``, ``"signs"``, and those with a loss."""
