"""Prove in the first batches which weights may come to the device in 16 bit; until then all come in 32.

A lane, the weights that travel together, is narrow once all of them were used and none of them needs its width. Code
that runs in later batches only is not seen, but for layers that are called more often than before.
"""

import warnings
from collections.abc import Collection, Iterable, Sequence

from torch import nn

from lightning_vram.techniques.sharding.gathered import WeightReads
from lightning_vram.techniques.sharding.group import ShardedGroup
from lightning_vram.techniques.sharding.lanes import ShardLane

_NUM_BATCHES = 8  # after which weights that were never used are waited for no longer


class NarrowTrial:
    """Of all weights of one module that autocast casts.

    Args:
        groups: Of its parameters.
        compiled: Parameters that compiled code reads, which nobody can watch there. It casts them as eager code does;
            calls are counted.
    """

    def __init__(self, groups: Iterable[ShardedGroup], compiled: Collection[nn.Parameter] = ()) -> None:
        self._lanes = [(group, lane) for group in groups for lane in group.lanes if lane.has_narrow_dtype]
        self._num_batches = 0
        self._unused: list[bool] = []  # of each lane: whether it has a weight that was not used yet
        for _, lane in self._lanes:
            lane.is_on_trial = True
            for parameter in lane.parameters:
                parameter.reads = None if parameter.sharded_param in compiled else WeightReads()

    def end_backward(self) -> list[bool]:
        """Return what this rank has seen, for :meth:`decide`."""
        for reads in self._on_trial():
            reads.end_backward()
        flags = []
        for group, lane in self._lanes:
            seen = [parameter.reads for parameter in lane.parameters if parameter.reads is not None]
            has_more_calls = group.has_more_calls and len(seen) < len(lane.parameters)  # those that are watched tell
            flags.append(has_more_calls or any(reads.needs_width for reads in seen))
            flags.append(not all(reads.is_used for reads in seen))
        return flags

    def decide(self, flags: Sequence[bool]) -> None:
        """Widen lanes for good, by the flags of :meth:`end_backward`, each set if it is on any rank."""
        lanes, self._lanes, self._unused = self._lanes, [], []
        for (group, lane), needs_width, is_unused in zip(lanes, flags[::2], flags[1::2], strict=True):
            if needs_width:
                if not lane.is_on_trial:
                    warnings.warn(
                        f"The layer of the weight {lane.parameters[0].name!r} was called more often before a backward "
                        "than in the batches before, and the gradients of its calls were added in 16 bit, this once. "
                        "From now on its weights travel in 32 bit.",
                        stacklevel=2,
                    )
                self._end(lane)
                lane.needs_width = True
            else:
                self._lanes.append((group, lane))
                self._unused.append(is_unused)

    def end_batch(self) -> None:
        """Let lanes be narrow whose weights were all used, after one backward or several."""
        self._num_batches += bool(self._unused)
        unused, self._unused = self._unused, []
        for (group, lane), is_unused in zip(self._lanes, unused, strict=False):
            if lane.is_on_trial and (not is_unused or self._num_batches >= _NUM_BATCHES):
                self._end(lane)
                group.allow_calls()

    def forget(self) -> None:
        """The iteration is given up: what it would have added up is never added."""
        for reads in self._on_trial():
            reads.forget_uses()

    def _on_trial(self) -> list[WeightReads]:
        parameters = [parameter for _, lane in self._lanes for parameter in lane.parameters]
        return [parameter.reads for parameter in parameters if parameter.reads is not None]

    def _end(self, lane: ShardLane) -> None:
        lane.is_on_trial = False
        for parameter in lane.parameters:
            parameter.reads = None
