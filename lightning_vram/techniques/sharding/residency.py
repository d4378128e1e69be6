"""Which shards stay on the device, within so many bytes: those that save most on the bus for each of them.

What crosses the bus for a weight in a step of one micro-batch, which gathers it for the forward and for the backward:

* at home on the host: the weight twice, its gradient once;
* with a copy on the device: the copy is renewed once, the gradient sent once. A frozen weight has neither;
* at home on the device, with its gradient and the states of its optimizer: nothing.

With AdamW in float32 these are 12, 8 for 4 bytes on the device, and 0 for 16: copies come first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Place = Literal["host", "copy", "device"]
"""Where the shards of a group are: on the host, there with a copy on the device, or on the device alone."""

_NUM_FETCHES = 2  # for the forward and for the backward
_NUM_HELD = 4  # weight, gradient and the two moments of AdamW, all in the dtype of the weight


@dataclass(frozen=True)
class ShardBytes:
    """What shards of one group take and what crosses the bus for them in a step, on one rank.

    Attributes:
        copy_bytes: On the device, of a copy.
        device_bytes: On the device, of weights, gradients and moments.
        sent_bytes: Over the bus, from and to the host.
        sent_with_copy_bytes: Over the bus, where there is a copy.
    """

    copy_bytes: int
    device_bytes: int
    sent_bytes: int
    sent_with_copy_bytes: int


def count_shard_bytes(shards: Iterable[tuple[int, torch.dtype, torch.dtype, bool]]) -> ShardBytes:
    """Count for shards of one group, each given as its numbers, dtype, dtype on the bus, and whether it is trained."""
    copied = held = sent = sent_with_copy = 0
    for numel, dtype, bus_dtype, is_trained in shards:
        one = numel * bus_dtype.itemsize
        copied += one
        held += numel * dtype.itemsize * (_NUM_HELD if is_trained else 1)
        sent += one * (_NUM_FETCHES + is_trained)
        sent_with_copy += 2 * one * is_trained
    return ShardBytes(copied, held, sent, sent_with_copy)


def plan_residency(groups: Sequence[ShardBytes], budget_bytes: int) -> list[Place]:
    """Choose where the shards of each group are.

    Greedy, by the bytes saved on the bus for each byte on the device; at equal gain the groups that come first: their
    steps are the last to be done before the next forward. What does not fit is passed over, for what comes behind it.
    A larger budget never takes fewer bytes, nor saves less.

    Args:
        groups: In the order in which they are computed.
        budget_bytes: Of the device.
    """
    steps = []  # gain for each byte, group, what for, bytes, and where the group has to be before
    for index, group in enumerate(groups):
        if not group.device_bytes:
            continue
        direct = group.sent_bytes / group.device_bytes
        first = (group.sent_bytes - group.sent_with_copy_bytes) / group.copy_bytes
        if first > direct:
            rest = group.device_bytes - group.copy_bytes
            steps.append((first, index, "copy", group.copy_bytes, "host"))
            steps.append((group.sent_with_copy_bytes / max(rest, 1), index, "device", rest, "copy"))
        else:
            steps.append((direct, index, "device", group.device_bytes, "host"))
    places: list[Any] = ["host"] * len(groups)
    for _, index, place, num_bytes, before in sorted(steps, key=lambda step: -step[0]):
        if places[index] == before and num_bytes <= budget_bytes:
            places[index] = place
            budget_bytes -= num_bytes
    return places


def plan_copies(copy_bytes: Sequence[int], budget_bytes: int) -> list[bool]:
    """Choose of which groups a copy stays on the device: those that come first, as far as they fit."""
    chosen = []
    for num_bytes in copy_bytes:
        chosen.append(num_bytes <= budget_bytes)
        budget_bytes -= num_bytes * chosen[-1]
    return chosen


def count_taken(groups: Iterable[ShardBytes], places: Iterable[Place]) -> int:
    """Return the bytes of the device that a plan takes."""
    pairs = zip(groups, places, strict=True)
    return sum({"host": 0, "copy": group.copy_bytes, "device": group.device_bytes}[place] for group, place in pairs)
