"""Nodes are read from ``/sys``; threads that were bound run where they did before afterwards."""

import os
import threading
from pathlib import Path

import pytest
from support.helpers import write_files

from lightning_vram.memory import host
from lightning_vram.memory.host import BoundThreads, cores_by_node, node_of_pci_device, own_cores

NODES = "sys/devices/system/node"
TWO_SOCKETS = {
    f"{NODES}/node0/cpulist": "0-1,4-5\n",
    f"{NODES}/node1/cpulist": "2-3,6\n",
    f"{NODES}/node2/cpulist": "\n",  # memory alone
    f"{NODES}/possible": "0-2\n",
    "sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
    "sys/bus/pci/devices/0000:04:00.0/numa_node": "-1\n",
}


def test_cores_of_nodes_that_have_some(tmp_path: Path) -> None:
    assert cores_by_node(write_files(tmp_path, TWO_SOCKETS)) == {0: {0, 1, 4, 5}, 1: {2, 3, 6}}


def test_a_system_that_does_not_tell_has_no_nodes(tmp_path: Path) -> None:
    assert cores_by_node(tmp_path) == {}
    assert node_of_pci_device("0000:3b:00.0", tmp_path) is None


@pytest.mark.parametrize(("address", "node"), [("0000:3b:00.0", 1), ("0000:04:00.0", None), ("0000:05:00.0", None)])
def test_the_node_of_a_device(tmp_path: Path, address: str, node: int | None) -> None:
    assert node_of_pci_device(address, write_files(tmp_path, TWO_SOCKETS)) == node


def test_where_the_system_has_no_affinity_there_are_no_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(host.os, "sched_getaffinity", raising=False)
    assert own_cores() == frozenset()


class Sleeper:
    """A thread that is there until :meth:`end`."""

    def __init__(self) -> None:
        self._may_end, started = threading.Event(), threading.Event()

        def run() -> None:
            started.set()
            self._may_end.wait()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        started.wait()

    @property
    def cores(self) -> set[int]:
        assert self._thread.native_id is not None
        return os.sched_getaffinity(self._thread.native_id)

    def end(self) -> None:
        self._may_end.set()
        self._thread.join()


needs_cores = pytest.mark.skipif(len(own_cores()) < 2, reason="needs two cores of Linux")


@needs_cores
def test_all_threads_are_bound_and_run_where_they_did_before_afterwards() -> None:
    before = os.sched_getaffinity(0)
    first, last = {min(before)}, {max(before)}
    older = Sleeper()
    os.sched_setaffinity(older._thread.native_id, last)
    bound = BoundThreads(first)
    younger = Sleeper()
    assert [os.sched_getaffinity(0), older.cores, younger.cores] == [first] * 3
    bound.undo()
    assert [os.sched_getaffinity(0), older.cores, younger.cores] == [before, last, before]
    older.end()
    younger.end()


@needs_cores
def test_cores_that_are_not_there_change_nothing() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(OSError, match="Invalid argument"):
        BoundThreads({100_000})
    assert os.sched_getaffinity(0) == before


@needs_cores
def test_where_threads_are_not_listed_the_own_one_is_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_TASKS", tmp_path / "nothing")
    before = os.sched_getaffinity(0)
    bound = BoundThreads({min(before)})
    assert os.sched_getaffinity(0) == {min(before)}
    bound.undo()
    assert os.sched_getaffinity(0) == before
