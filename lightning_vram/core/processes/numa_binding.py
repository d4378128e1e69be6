"""Bind each rank to the NUMA node of its device."""

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
    machine: tuple[str, ...]
    node: int | None  # of its device; None: it is not bound
    cores: frozenset[int]  # that it will run on
    nodes: frozenset[int]  # that it may run on now


@dataclass(frozen=True)
class NumaBinding:
    """Bound threads of this rank, until :meth:`undo`."""

    threads: BoundThreads
    num_threads: int  # that this rank can keep busy while the other ranks of the node do the same
    description: str  # which ranks of this machine are on which node

    def undo(self) -> None:
        """Let the threads run where they ran before."""
        self.threads.undo()


def bind_to_node_of(
    device: torch.device, local_world_size: int, *, idle_nodes_ok: bool = False, root: Path = Path("/")
) -> NumaBinding | None:
    """Bind the threads of this rank, and the host memory that they write to first, to its device's node. A collective.

    ``None`` if nothing has changed: there is one node, the device does not name its own, no core there may be used, the
    process is bound already, or a node has no rank and ``idle_nodes_ok`` is false: its cores and memory bandwidth would
    be idle. ``root`` is where ``proc`` and ``sys`` are mounted.
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
