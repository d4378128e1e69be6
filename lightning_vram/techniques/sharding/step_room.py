"""What the first step leaves free on the device is filled with copies of shards, which then need not be fetched."""

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from lightning_vram.memory.device.room import device_room
from lightning_vram.techniques.sharding.apply import FullSharding

_MARGIN = 10  # the part of the device's memory that is left free: later batches may be larger


class StepRoom:
    """Measures one step of a sharded module, on one rank: each has copies as far as it has room.

    Args:
        sharding: On a device whose allocator tells what it holds.
        optimizers: Of the module. The step is over when all of them have stepped.
    """

    def __init__(self, sharding: FullSharding, optimizers: Iterable[Optimizer]) -> None:
        self._sharding = sharding
        self._waiting = {id(optimizer) for optimizer in optimizers}
        self._room = device_room(sharding.device)
        if self._room is not None:
            self._room.reset()

    def note_step(self, optimizer: Optimizer) -> int | None:
        """Fill what is free with copies after the last optimizer's first step.

        Returns:
            Bytes that they take; ``None`` at any other step.
        """
        if id(optimizer) not in self._waiting:
            return None
        self._waiting.remove(id(optimizer))
        if self._waiting or self._room is None:
            return None
        _, total_bytes = torch.get_device_module(self._sharding.device).mem_get_info(self._sharding.device)
        was_more_bytes = self._room.peak_since_reset() - self._room.allocated_bytes()
        return self._sharding.keep_copies(max(0, self._room.room_bytes() - was_more_bytes - total_bytes // _MARGIN))
