"""Nodes are read from ``/sys``."""

from pathlib import Path

import pytest
from support.helpers import write_files

from lightning_vram.memory.host import cores_by_node, node_of_pci_device

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
