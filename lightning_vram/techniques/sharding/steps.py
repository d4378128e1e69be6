"""Steps that go on beside the training: whoever wants to read what one writes waits for it.

What only reads the shards, as an average of weights does, is waited for by who may write to them, and by who wants what
comes of it; not by a fetch for the next forward.
"""

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
        self._pending: list[tuple[Ticket, list[Tensor], bool]] = []  # jobs in their order
        self._reader: int | None = None  # the thread that reads for a step

    def begin(self, ticket: Ticket, watched: Iterable[Tensor], *, is_reader: bool = False) -> None:
        """Note that ``watched`` tensors are not to be used until ``ticket`` is done.

        Args:
            ticket: Of a job that is done after those before.
            watched: What it uses.
            is_reader: Whether it leaves the shards as they are.
        """
        if self._pending and self._pending[-1][0].is_done:
            self._end(len(self._pending))  # all: else there would be more and more where nobody steps
        watched = list(watched)
        for lane in self._lanes:
            if lane.is_split:  # all of it comes to rest
                watched += [parameter.sharded_param for parameter in lane.parameters]
        self._pending.append((ticket, watched, is_reader))
        watch(watched, self.wait)

    def wait(self) -> None:
        """Wait until the shards are written, and nobody reads them."""
        self._end(len(self._pending))

    def wait_for_writes(self) -> None:
        """Wait until the shards are written, before reading them."""
        self._end(max((place for place, (*_, is_reader) in enumerate(self._pending, 1) if not is_reader), default=0))

    def _end(self, count: int) -> None:
        """Wait for the first of the pending jobs."""
        ended, self._pending = self._pending[:count], self._pending[count:]
        if not ended:
            return
        try:
            ended[-1][0].wait()
        finally:
            for _, watched, _ in ended:
                unwatch(watched)
            for _, watched, _ in self._pending:
                watch(watched, self.wait)
            self.guard()

    def guard(self) -> None:
        """Hear of it when somebody gets hold of a shard, who may write to it: see :meth:`touch`."""
        for lane in self._lanes:
            if lane.has_copies or lane.own_device != lane.device:
                watch((parameter.sharded_param for parameter in lane.parameters), partial(self.touch, lane))
            for parameter in lane.parameters if lane.is_split else ():
                parameter.watch_gradient()

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
