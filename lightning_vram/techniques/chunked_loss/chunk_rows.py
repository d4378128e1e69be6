"""How many tokens' logits are computed at a time."""

from typing import Literal

import torch
from torch import Tensor

from lightning_vram.core.hooks.moment import is_in_backward
from lightning_vram.core.tensors.parameter_classes import REAL_TYPES
from lightning_vram.memory.device.room import DeviceRoom, device_room

_FEWEST_ROWS = {"cpu": 128}  # fewer leave products of matrices slow; elsewhere 256
_FEWEST_WHERE_FULL = 16
_MATRICES = 5  # of a chunk, in float32: logits, their logarithms, the gradients of both, one more for soft caps
_MARGIN = 10  # the part of the room that is left free: cached blocks may not fit


def find_chunk_rows(chunk: int | Literal["auto"], hidden: Tensor, num_rows: int, num_classes: int) -> int:
    """Return how many tokens are computed at a time, from sizes only, so that a run can be repeated."""
    if chunk != "auto":
        return chunk
    fewest = _FEWEST_ROWS.get(hidden.device.type, 256)
    return max(fewest, 1 << max(0, (num_rows * hidden.shape[-1] // num_classes - 1).bit_length()))


class ChunkRows:
    """:func:`find_chunk_rows`, and fewer from then on where the device has no room for as many.

    Room is asked for in each forward, which waits for nothing: moments of the optimizer come after the first. What a
    checkpoint runs again has the chunks of its first run. Tensors without values, as in estimates, have no room.
    """

    def __init__(self, chunk: int | Literal["auto"]) -> None:
        self._chunk = chunk
        self._rooms: dict[torch.device, DeviceRoom | None] = {}
        self._fewer: dict[tuple[torch.device, int, int, int], int] = {}

    def __call__(self, hidden: Tensor, num_rows: int, num_classes: int, *, asks: bool) -> int:
        """Return the rows; ``asks`` whether they are computed now, so that free memory counts."""
        rows = find_chunk_rows(self._chunk, hidden, num_rows, num_classes)
        device, width = hidden.device, hidden.shape[-1]
        if self._chunk != "auto" or type(hidden) not in REAL_TYPES:
            return rows
        key = (device, num_rows, width, num_classes)
        rows = self._fewer.get(key, rows)
        if not asks or is_in_backward():
            return rows
        if device not in self._rooms:
            self._rooms[device] = device_room(device)
        room = self._rooms[device]
        if room is None:
            return rows
        num_bytes = max(4, hidden.element_size())
        # The gradient of the weights in float32, and a cast of them or of it; that of the hidden states.
        lasting_bytes = num_bytes * (2 * num_classes + num_rows) * width
        allowed_bytes = room.room_bytes() * (_MARGIN - 1) // _MARGIN - lasting_bytes
        fitting = max(_FEWEST_WHERE_FULL, allowed_bytes // (_MATRICES * num_bytes * num_classes))
        if fitting < rows:
            rows = self._fewer[key] = 1 << (fitting.bit_length() - 1)
        return rows
