"""NUMA nodes of this machine, from Linux's ``/sys``: memory lies in the node of the core that first writes to it."""

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lightning_vram.memory.host.control_groups import read_text

_NO_NODE = -1
_TASKS = Path("/proc/self/task")


def cores_by_node(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """Return the processor cores of each NUMA node that has some; nothing where the system does not tell."""
    folders = {
        int(number): folder
        for folder in (root / "sys/devices/system/node").glob("node*")
        if (number := folder.name.removeprefix("node")).isdigit()
    }
    cores = {number: _parse_list(read_text(folder / "cpulist")) for number, folder in sorted(folders.items())}
    return {number: of_node for number, of_node in cores.items() if of_node}


def node_of_pci_device(address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device such as ``"0000:3b:00.0"``; ``None`` if the system does not tell."""
    text = read_text(root / "sys/bus/pci/devices" / address / "numa_node")
    with suppress(ValueError):
        node = int(text)
        return node if node != _NO_NODE else None
    return None


def own_cores() -> frozenset[int]:
    """Return the cores that this thread may run on; none where the system does not tell (macOS, Windows)."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


class BoundThreads:
    """Bind all threads of this process, and those they start, to ``cores`` until :meth:`undo`."""

    def __init__(self, cores: Iterable[int]) -> None:
        cores = set(cores)
        self._of_all = own_cores()
        self._before: dict[int, frozenset[int]] = {}
        os.sched_setaffinity(0, cores)  # first, so that an error leaves nothing half done
        for thread in _threads():
            with suppress(OSError):  # one that has ended meanwhile
                is_own = thread == threading.get_native_id()
                self._before[thread] = self._of_all if is_own else frozenset(os.sched_getaffinity(thread))
                os.sched_setaffinity(thread, cores)

    def undo(self) -> None:
        """Let each thread run where it could before; younger ones where the thread that was bound could."""
        for thread in _threads():
            with suppress(OSError):
                os.sched_setaffinity(thread, self._before.get(thread, self._of_all))


def _threads() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(_TASKS)]
    return [threading.get_native_id()]


def _parse_list(text: str) -> frozenset[int]:
    """Read ``"0-3,8"``."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
