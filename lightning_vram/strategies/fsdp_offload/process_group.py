"""Make the process group of all ranks, and take it down before Python ends.

As Lightning does it, but for two faults. The group meets in a store of this attempt alone, so that a restart by
``torchrun`` does not connect to the processes of the attempt that died. And it is destroyed at exit.
"""

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch.distributed.rendezvous import rendezvous

from lightning_vram.core.processes.clean_exit import leave_group_at_exit
from lightning_vram.core.processes.lost_peers import naming_lost_peers
from lightning_vram.core.processes.restart_store import attempt_store

_log = logging.getLogger(__name__)


def default_backend(device: torch.device) -> str:
    """Choose the backend for training on ``device`` with parts of the state on the host, where gloo is used.

    Raises:
        ValueError: If torch knows no backend for ``device``.

    Example:
        >>> default_backend(torch.device("cuda", 0))
        'cpu:gloo,cuda:nccl'
    """
    if device.type == "cpu":
        return "gloo"
    own = dist.Backend.default_device_backend_map.get(device.type)
    if own is None:
        raise ValueError(f"default_backend(device) knows no backend for {device.type!r}; pass one by name.")
    return f"cpu:gloo,{device.type}:{own}"


def connect(cluster_environment: ClusterEnvironment, backend: str, *, timeout: timedelta, device: torch.device) -> None:
    """Make the process group of all ranks; a collective over them. Does nothing if there is one already.

    It is destroyed at exit, without a barrier: a rank that leaves does not wait for one that died. NCCL connects at
    once, and an error of the network shows here rather than at the first collective.

    Raises:
        RuntimeError: If this torch was built without ``torch.distributed``.
        LostPeerError: If a rank does not come within ``timeout``, or dies meanwhile.
    """
    if not dist.is_available():
        raise RuntimeError("This torch was built without torch.distributed: use one that has it, or a single device.")
    if dist.is_initialized():
        _log.debug("There is a process group already: it is used as it is.")
        return
    rank, world_size = cluster_environment.global_rank(), cluster_environment.world_size()
    os.environ["MASTER_ADDR"] = cluster_environment.main_address
    os.environ["MASTER_PORT"] = str(cluster_environment.main_port)
    _log.info("Connecting rank %d of %d over %s.", rank, world_size, backend)
    with naming_lost_peers(rank, world_size, lambda: "making the process group", timeout):
        store, rank, world_size = next(rendezvous("env://", rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=attempt_store(store, rank, world_size, timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
    leave_group_at_exit()
    rank_zero_info(
        f"{'-' * 100}\ndistributed_backend={backend}\nAll {world_size} processes are connected.\n{'-' * 100}"
    )
