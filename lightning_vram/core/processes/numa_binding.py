"""Each rank on the NUMA node of its device: its threads, and the host memory that they are the first to write to."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch

from lightning_vram.core.processes.rank_errors import gather_objects
from lightning_vram.memory.device.accelerators import pci_address
from lightning_vram.memory.host.cores import cores_of_rank
from lightning_vram.memory.host.machine import machine_name
from lightning_vram.memory.host.numa import BoundThreads, cores_by_node, node_of_pci_device, own_cores


@dataclass(frozen=True)
class _Claim:
    """What one rank could be bound to.

    Attributes:
        machine: That it runs on.
        node: Of its device; ``None``: it is left alone.
        cores: That it will run on.
        nodes: That it may run on now.
    """

    machine: tuple[str, ...]
    node: int | None
    cores: frozenset[int]
    nodes: frozenset[int]


class NumaBinding:
    """Threads of this rank that are bound, until :meth:`undo`.

    Attributes:
        num_threads: That this rank can keep busy while its neighbours on the node do the same.
        description: Which ranks of this machine are on which node.
    """

    def __init__(self, threads: BoundThreads, num_threads: int, description: str) -> None:
        self._threads = threads
        self.num_threads = num_threads
        self.description = description

    def undo(self) -> None:
        """Let the threads run where they did before."""
        self._threads.undo()


def bind_to_node_of(
    device: torch.device, local_world_size: int, *, idle_nodes_ok: bool = False, root: Path = Path("/")
) -> NumaBinding | None:
    """Bind this process to the node of its device, with what it may use there. A collective.

    Args:
        device: Of this rank.
        local_world_size: Ranks on this machine, this one included.
        idle_nodes_ok: Whether to do so where a node has no rank: its cores, and the rate of its memory, would lie idle.
        root: Where ``proc`` and ``sys`` are mounted.

    Returns:
        ``None`` if nothing has changed: there is one node, the device does not tell its own, no core there may be used,
        a node would lie idle, or the process is bound already.
    """
    claim = _claim(device, root)
    on_machine = [(rank, other) for rank, other in enumerate(gather_objects(claim)) if other.machine == claim.machine]
    taken = {other.node for _, other in on_machine}
    is_idle = any(node not in taken for _, other in on_machine for node in other.nodes)
    if claim.node is None or claim.cores == own_cores() or (is_idle and not idle_nodes_ok):
        return None
    num_threads = cores_of_rank(local_world_size, root)  # before: then it counts those of all nodes
    shares = (Fraction(1, sum(core in other.cores for _, other in on_machine)) for core in claim.cores)
    try:
        threads = BoundThreads(claim.cores)
    except OSError:
        return None
    return NumaBinding(threads, max(1, min(num_threads, int(sum(shares)))), _describe(on_machine))


def _claim(device: torch.device, root: Path) -> _Claim:
    nodes, own, address = cores_by_node(root), own_cores(), pci_address(device)
    node = node_of_pci_device(address, root) if address is not None and len(nodes) > 1 else None
    cores = nodes.get(node, frozenset()) & own if node is not None else frozenset()
    usable = frozenset(number for number, of_node in nodes.items() if of_node & own)
    return _Claim(machine_name(), node if cores else None, cores or own, usable)


def _describe(on_machine: list[tuple[int, _Claim]]) -> str:
    ranks: dict[int, list[int]] = {}
    for rank, claim in on_machine:
        if claim.node is not None:
            ranks.setdefault(claim.node, []).append(rank)
    nodes = "; ".join(f"{', '.join(map(str, ranks[node]))} on node {node}" for node in sorted(ranks))
    return f"Threads and host memory of each rank are bound to the NUMA node of its device: rank {nodes}."
