"""What of a card decides which kernels run on it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CudaSpec:
    """A card of NVIDIA, as far as its kernels depend on it."""

    compute_capability: tuple[int, int]  # such as ``(8, 9)`` for an RTX 4090
    stand_in: torch.device  # the device that stands for it, of a type without kernels
    num_bytes: int = 0  # memory of the card, for programs that ask

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes in bfloat16 itself; older cards convert."""
        return self.compute_capability >= (8, 0)
