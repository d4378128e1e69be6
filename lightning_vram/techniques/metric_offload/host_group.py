"""A group of ranks that gathers tensors from host to host: NCCL takes device tensors only."""

from weakref import WeakKeyDictionary

import torch.distributed as dist

# As long as the ranks' own group: where one is closed, torch makes the next of the same ranks under the same name,
# finds the addresses of the closed one, and fails.
_made: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def host_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return a group that takes tensors on the host: ``group`` itself if it does, else one over gloo.

    The first call for a group is a collective over its ranks. ``None`` means all ranks, and is returned if there is
    only one process.
    """
    group = group or dist.group.WORLD
    if group is None or _takes_host_tensors(group):
        return group
    if group not in _made:
        ranks = dist.get_process_group_ranks(group)
        _made[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)  # other ranks do not come
    return _made[group]


def _takes_host_tensors(group: dist.ProcessGroup) -> bool:
    return any(part.startswith("cpu:") for part in dist.get_backend_config(group).split(","))
