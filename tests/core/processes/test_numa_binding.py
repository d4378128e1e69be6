"""A rank is bound to the node of its device where that helps, and told how many threads it has there."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import write_files

from lightning_vram.core import processes
from lightning_vram.core.processes import bind_to_node_of
from lightning_vram.memory.host import own_cores

CARD = torch.device("cuda", 0)
ADDRESSES = ["0000:3b:00.0", "0000:3c:00.0", "0000:d8:00.0", "0000:d9:00.0"]  # two on each node


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of two nodes with 4 cores each."""
    nodes = {f"sys/devices/system/node/node{n}/cpulist": f"{4 * n}-{4 * n + 3}" for n in range(2)}
    devices = {f"sys/bus/pci/devices/{a}/numa_node": str(i // 2) for i, a in enumerate(ADDRESSES)}
    return write_files(tmp_path, nodes | devices)


class _AsksOthersError(Exception):
    """A rank has said what it would do."""


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch, root: Path) -> Any:
    """Binds the first of several ranks; returns what it is told, and the cores that its threads are bound to."""
    bound: list[Any] = []
    monkeypatch.setattr(processes, "bind_threads", lambda logical_cpu_indices: bound.append(logical_cpu_indices))

    def bind(devices: list[int | None], own: list[set[int]] | None = None, **options: Any) -> tuple[Any, list[Any]]:
        bound.clear()
        own = own or [set(range(8))] * len(devices)
        claims: list[Any] = []

        def claim(value: Any) -> Any:
            claims.insert(0, value)
            raise _AsksOthersError

        monkeypatch.setattr(processes, "gather_objects", claim)
        for device, cores in reversed(list(zip(devices, own, strict=True))):
            address = None if device is None else ADDRESSES[device]
            monkeypatch.setattr(processes, "pci_address", lambda _, address=address: address)
            monkeypatch.setattr(processes.host, "own_cores", lambda cores=cores: frozenset(cores))
            with pytest.raises(_AsksOthersError):
                bind_to_node_of(CARD, len(devices), root=root)
        monkeypatch.setattr("lightning_vram.memory.host.os.sched_getaffinity", lambda _: own[0], raising=False)
        monkeypatch.setattr(processes, "gather_objects", lambda _: claims)
        return bind_to_node_of(CARD, len(devices), root=root, **options), bound

    return bind


def test_ranks_on_both_nodes_share_theirs(bind: Any) -> None:
    binding, bound = bind([0, 1, 2, 3])
    assert bound == [{0, 1, 2, 3}]
    assert binding.num_threads == 2  # as without: 8 cores of 4 ranks
    assert binding.description == (
        "Threads and host memory of each rank are bound to the NUMA node of its device: the ranks of this machine to "
        "0, 0, 1, 1."
    )
    binding.undo()
    assert bound == [{0, 1, 2, 3}, set(range(8))]


def test_a_crowded_node_gives_fewer_threads(bind: Any) -> None:
    num_threads = {(0, 1, 2): 2, (2, 0): 4, (0, 1, 1, 1, 2): 1}
    assert {devices: bind(list(devices))[0].num_threads for devices in num_threads} == num_threads


def test_a_node_is_not_left_idle_unless_told_to(bind: Any) -> None:
    assert bind([0, 1]) == (None, [])
    binding, bound = bind([2], idle_nodes_ok=True)
    assert bound == [{4, 5, 6, 7}]
    assert binding.num_threads == 4


def test_what_the_job_may_not_use_counts_for_nothing(bind: Any) -> None:
    binding, bound = bind([0], [{2, 3}])
    assert (binding, bound) == (None, [])  # it is there already
    binding, bound = bind([0, 2], [{2, 3, 4}, {2, 3, 4}])
    assert bound == [{2, 3}]
    assert binding.num_threads == 1  # 3 cores of 2 ranks
    assert bind([0], [{4, 5}]) == (None, [])  # no core there may be used


def test_what_does_not_tell_or_forbids_it_is_left_alone(bind: Any, root: Path, monkeypatch: Any) -> None:
    def refuse(logical_cpu_indices: set[int]) -> None:
        raise PermissionError

    assert bind([None], idle_nodes_ok=True) == (None, [])
    monkeypatch.setattr(processes, "bind_threads", refuse)
    assert bind([0, 2]) == (None, [])
    (root / "sys/devices/system/node/node1/cpulist").unlink()
    (root / "sys/devices/system/node/node0/cpulist").write_text("0-7")  # a machine of one node
    assert bind([0], idle_nodes_ok=True) == (None, [])


def cores_of(thread: ThreadPoolExecutor) -> set[int]:
    return thread.submit(os.sched_getaffinity, 0).result()


@pytest.mark.skipif(len(own_cores()) < 2, reason="needs two cores of Linux")
def test_all_threads_are_bound_and_run_where_they_did_before_afterwards(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    before = os.sched_getaffinity(0)
    first = {min(before)}
    write_files(root, {"sys/devices/system/node/node0/cpulist": str(min(before))})
    write_files(root, {"sys/devices/system/node/node1/cpulist": ",".join(map(str, before - first))})
    monkeypatch.setattr(processes, "pci_address", lambda _: ADDRESSES[0])
    with ThreadPoolExecutor(1) as older, ThreadPoolExecutor(1) as younger:
        assert cores_of(older) == before
        binding = bind_to_node_of(CARD, 1, idle_nodes_ok=True, root=root)
        assert [os.sched_getaffinity(0), cores_of(older), cores_of(younger)] == [first] * 3
        binding.undo()
        assert [os.sched_getaffinity(0), cores_of(older), cores_of(younger)] == [before] * 3
