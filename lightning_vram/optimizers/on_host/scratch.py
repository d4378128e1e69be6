"""Memory that is used again and again within a step."""

import torch
from torch import Tensor


class Scratch:
    """Memory of one batch after the other: the host takes about as long to give out fresh pages as a step.

    Args:
        like: A tensor on the device.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._blocks: list[Tensor] = []
        self._next = 0

    def take(self, count: int) -> Tensor:
        """Return flat float32 memory for so many numbers."""
        place, self._next = self._next, self._next + 1
        if place == len(self._blocks):
            self._blocks.append(self._like.new_empty(count, dtype=torch.float32))
        elif self._blocks[place].numel() < count:
            self._blocks[place] = self._like.new_empty(count, dtype=torch.float32)
        return self._blocks[place][:count]

    def take_back(self) -> None:
        """Get all of it for the next batch."""
        self._next = 0
