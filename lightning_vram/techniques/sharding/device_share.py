"""The bytes of the device that shards at home on the host may take: planned before, or found in the midst of it."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_vram.techniques.sharding.group import ShardedGroup
from lightning_vram.techniques.sharding.residency import (
    Place,
    count_shard_bytes,
    count_taken,
    plan_copies,
    plan_residency,
)


class DeviceShare:
    """Of one sharded module, on one rank."""

    def __init__(self) -> None:
        self._spare_bytes = 0  # that were given and not taken

    def plan(
        self,
        parts: Sequence[Sequence[nn.Module]],
        replicated: Iterable[nn.Parameter],
        dtypes: Mapping[nn.Parameter, torch.dtype | None],
        num_shards: int,
        device_bytes: float,
    ) -> list[Place]:
        """Choose where shards are, before there are any.

        Args:
            parts: Modules that are sharded together, in the order of sharding, the root last: a parameter is of the
                first that has it. The forward begins with the root.
            replicated: Parameters that are not sharded.
            dtypes: What some are sent as; others are sent as they are.
            num_shards: Of each parameter.
            device_bytes: That may be taken; a ``float`` is a share of what all would take.
        """
        claimed = {id(parameter) for parameter in replicated}
        claimed |= {
            id(parameter)
            for modules in parts
            for module in modules
            for part in module.modules()
            if isinstance(part, FSDPModule)  # sharded already, it stays as it is
            for parameter in part.parameters()
        }
        needs = []
        for modules in parts:
            ours = {id(p): p for module in modules for p in module.parameters() if id(p) not in claimed}
            claimed |= ours.keys()
            sizes = (-(-p.shape[0] // num_shards) * (p.numel() // p.shape[0]) for p in ours.values())  # padded
            kinds = ((p.dtype, dtypes.get(p) or p.dtype, p.requires_grad) for p in ours.values())
            needs.append(count_shard_bytes([(size, *kind) for size, kind in zip(sizes, kinds, strict=True)]))
        is_share = isinstance(device_bytes, float)
        budget_bytes = int(device_bytes * sum(need.device_bytes for need in needs) if is_share else device_bytes)
        *others, root = needs
        root_place, *places = plan_residency([root, *others], budget_bytes)
        self._spare_bytes = budget_bytes - count_taken(needs, [*places, root_place])
        return [*places, root_place]

    def limit(self, groups: Sequence[ShardedGroup]) -> None:
        """Have the lanes of ``groups`` ask before their copies take more bytes than planned."""
        for lane in (lane for group in groups for lane in group.lanes):
            lane.may_take = self._may_take

    def _may_take(self, num_bytes: int) -> bool:
        """Take more bytes, if they are there."""
        is_there = num_bytes <= self._spare_bytes
        self._spare_bytes -= num_bytes * is_there
        return is_there

    def keep_copies(self, groups: Sequence[ShardedGroup], device_bytes: int) -> int:
        """Have copies of shards stay on the device from now on, as far as they fit, and return their bytes.

        No step may be under way.
        """
        lanes = [
            [lane for lane in group.lanes if lane.resident is None] for group in groups if group.landing is not None
        ]
        sizes = [sum(lane.numel * lane.dtype.itemsize for lane in one) for one in lanes]
        chosen = plan_copies(sizes, device_bytes)
        taken_bytes = sum(size for size, is_chosen in zip(sizes, chosen, strict=True) if is_chosen)
        self._spare_bytes = device_bytes - taken_bytes
        for lane in (lane for one, is_chosen in zip(lanes, chosen, strict=True) if is_chosen for lane in one):
            lane.keep_copy()
        self.limit(groups)
        if any(chosen) and torch.accelerator.is_available():
            # Another stream is to write to memory that the computation has just left.
            torch.accelerator.synchronize()
        return taken_bytes
