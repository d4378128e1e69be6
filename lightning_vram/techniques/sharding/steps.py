"""Steps that go on beside the training: whoever wants to read what one writes waits for it."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from lightning_vram.core.host.worker import Ticket
from lightning_vram.techniques.sharding.gathered import unwatch, watch
from lightning_vram.techniques.sharding.lanes import ShardLane


class ShardSteps:
    """Of the shards of one group."""

    def __init__(self, lanes: Sequence[ShardLane]) -> None:
        self._lanes = lanes
        self._pending: Ticket | None = None
        self._watched: list[Tensor] = []
        self._reader: int | None = None  # the thread that reads for a step

    def begin(self, ticket: Ticket, watched: Iterable[Tensor]) -> None:
        """Note that the shards are written, and ``watched`` tensors not to be read, until ``ticket`` is done."""
        watched = list(watched)
        for lane in self._lanes:
            if lane.is_split:  # all of it comes to rest
                watched += [parameter.sharded_param for parameter in lane.parameters]
        self._pending, self._watched = ticket, self._watched + watched  # steps are done in their order
        watch(watched, self.wait)

    def wait(self) -> None:
        """Wait until the shards are written."""
        pending, self._pending = self._pending, None
        watched, self._watched = self._watched, []
        if pending is not None:
            try:
                pending.wait()
            finally:
                unwatch(watched)
                self.guard()

    def guard(self) -> None:
        """Hear of it when somebody gets hold of a shard, who may write to it: see :meth:`touch`."""
        for lane in self._lanes:
            if lane.has_copies or lane.own_device != lane.device:
                watch((parameter.sharded_param for parameter in lane.parameters), partial(self.touch, lane))
            for parameter in lane.parameters if lane.is_split else ():
                kept = parameter.kept_gradient
                if kept is not None:
                    watch([kept], parameter.read_gradient)

    def rest(self) -> None:
        """Free the memory that split shards were joined in for somebody who has read them; no step is under way."""
        joined = [lane for lane in self._lanes if lane.is_joined]
        for lane in joined:
            lane.refresh()
        if joined:
            self.guard()

    def touch(self, lane: ShardLane) -> None:
        """Have copies of the shards in ``lane`` made again, once those are written; first the device has read them."""
        self.wait()
        if not self._is_reading_for_step:
            lane.wait_for_copies()
            lane.open()
        lane.touch()

    def read_gradient(self, parameter: Any) -> None:
        """Have what is kept in 16 bit in the dtype of the shard; not for a step, which needs a part at a time.

        No step is reading it beside this: whoever comes to a gradient of such a step waits in :meth:`wait` first.
        """
        if not self._is_reading_for_step:
            parameter.widen_gradient()

    @property
    def _is_reading_for_step(self) -> bool:
        return self._reader == threading.get_ident()

    @contextmanager
    def reading_for_step(self) -> Iterator[None]:
        """Who gets hold of shards meanwhile writes in another thread, which waits: this one need not."""
        self._reader = threading.get_ident()
        try:
            yield
        finally:
            self._reader = None
