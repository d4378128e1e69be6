"""Processes that share memory have the same machine."""

import socket
from pathlib import Path

from support.helpers import write_files

from lightning_vram.memory.host import machine_name


def write_machine(root: Path, boot: str, container: str) -> Path:
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/mnt").symlink_to(container)
    return write_files(root, {"proc/sys/kernel/random/boot_id": f"{boot}\n"})


def test_machines_of_one_name_and_containers_of_one_machine_are_told_apart(tmp_path: Path) -> None:
    roots = [("a", "mnt:[1]"), ("a", "mnt:[2]"), ("b", "mnt:[1]")]
    names = [machine_name(write_machine(tmp_path / str(i), *root)) for i, root in enumerate(roots)]
    assert names == [(socket.gethostname(), *root) for root in roots]
