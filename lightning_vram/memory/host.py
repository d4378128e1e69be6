"""The host: the memory and the cores this process may use, control groups of a job included."""

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.memory.units import KIB


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder (it may not exist) of each control group of this process, innermost first, and its version."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            yield from ((group, 2) for group in _upwards(root / "sys/fs/cgroup", path))
        elif controller in controllers.split(","):
            for mount in {controller, controllers}:  # several controllers may share one
                yield from ((group, 1) for group in _upwards(root / "sys/fs/cgroup" / mount, path))


def read_text(file: Path) -> str:
    """Return what is in a file of the system; nothing if it cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    group = mount / path.strip("/")
    while True:
        yield group
        if group == mount or mount not in group.parents:
            return
        group = group.parent


# By version of control groups: files of limits (high: it is slowed down) and of use, keys of inactive and active cache.
_NAMES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file", "active_file"),
}


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Estimate how much more memory this process can take, droppable page cache included; ``None``: unknown."""
    machine = _meminfo_bytes(root, "MemAvailable") or _vm_stat_bytes(root)
    if machine is None:
        machine = _sysconf_bytes("SC_AVPHYS_PAGES") or _sysconf_bytes("SC_PHYS_PAGES")
    groups = (_free_bytes(group, version) for group, version in control_groups("memory", root))
    return min((one for one in (machine, *groups) if one is not None), default=None)


def total_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory of the machine, as far as the kernel manages it; ``None``: unknown."""
    return _meminfo_bytes(root, "MemTotal") or _sysconf_bytes("SC_PHYS_PAGES")


def free_swap_bytes(root: Path = Path("/")) -> int:
    """Return the free swap space, for memory that is not pinned; 0 if unknown."""
    return _meminfo_bytes(root, "SwapFree") or 0


def _meminfo_bytes(root: Path, name: str) -> int | None:
    for line in read_text(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if key == name and value.split()[0].isdigit():
            return int(value.split()[0]) * KIB
    return None


_VM_STAT = "usr/bin/vm_stat"  # of macOS
_PAGE_SIZE = re.compile(r"page size of (\d+) bytes")
_FREE_PAGES = re.compile(r"Pages (?:free|inactive|speculative):\s*(\d+)\.")


def _vm_stat_bytes(root: Path) -> int | None:
    """Return what macOS has available: free pages, and inactive ones, which it compresses or drops."""
    if not (root / _VM_STAT).exists():
        return None
    text = subprocess.run([root / _VM_STAT], capture_output=True, text=True, check=False).stdout
    size = _PAGE_SIZE.search(text)
    return None if size is None else sum(map(int, _FREE_PAGES.findall(text))) * int(size[1])


def _sysconf_bytes(name: str) -> int | None:
    if name not in getattr(os, "sysconf_names", ()):
        return None
    pages, page_bytes = os.sysconf(name), os.sysconf("SC_PAGE_SIZE")
    return pages * page_bytes if pages > 0 and page_bytes > 0 else None


def _free_bytes(group: Path, version: int) -> int | None:
    limit_files, usage_file, inactive, active = _NAMES[version]
    limits = [limit for name in limit_files if (limit := _number(group / name)) is not None]
    usage = _number(group / usage_file)
    if not limits or usage is None:
        return None  # "max": no limit
    cache = 0
    for line in read_text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in (inactive, active) and value.strip().isdigit():
            cache += int(value) if key == inactive else int(value) // 2
    return max(0, min(limits) - usage + cache)


def _number(file: Path) -> int | None:
    text = read_text(file)
    return int(text) if text.isdigit() else None


_NO_NODE = -1


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
    with suppress(ValueError):
        node = int(read_text(root / "sys/bus/pci/devices" / address / "numa_node"))
        return node if node != _NO_NODE else None
    return None


def reclaimable_gpu_bytes(address: str, root: Path = Path("/")) -> int:
    """Return the page cache that lies in the memory of a GPU, by its PCI address, and that the kernel can drop.

    On GH200 and GB200 the memory of the GPU is a NUMA node of the system, unless the driver is configured to manage it
    alone. Elsewhere 0.
    """
    node = re.search(r"Node:\s*(\d+)", read_text(root / "proc/driver/nvidia/gpus" / address / "numa_status"))
    if node is None:
        return 0
    text = read_text(root / f"sys/devices/system/node/node{node[1]}/meminfo")
    kib = {key: int(size) for key, size in re.findall(r"(\w+\(file\)):\s*(\d+) kB", text)}
    return (kib.get("Inactive(file)", 0) + kib.get("Active(file)", 0) // 2) * KIB


def is_wsl(root: Path = Path("/")) -> bool:
    """Whether this is Linux within Windows."""
    return "microsoft" in read_text(root / "proc/sys/kernel/osrelease").lower()


def is_tegra(root: Path = Path("/")) -> bool:
    """Whether this is a Jetson or another board with a Tegra chip; GB10 is none."""
    files = ("proc/device-tree/compatible", "proc/sys/kernel/osrelease")
    return any("tegra" in read_text(root / file) for file in files)


def own_cores() -> frozenset[int]:
    """Return the cores that this thread may run on; none where the system does not tell (macOS, Windows)."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _parse_list(text: str) -> frozenset[int]:
    """Read ``"0-3,8"``."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def cores_of_rank(local_world_size: int, root: Path = Path("/")) -> int:
    """Count the cores that this process may keep busy while the other ranks of this machine do the same: at least 1.

    What SLURM gave the task, shared by its ranks; without SLURM the cores that this process may run on, shared by all
    local ranks. At most this rank's share of its control groups' processor time. ``OMP_NUM_THREADS`` does not count:
    ``torchrun`` sets it to 1.

    Example:
        >>> cores_of_rank(local_world_size=10_000)
        1
    """
    check_positive_int("cores_of_rank(local_world_size)", local_world_size)
    bound = len(own_cores()) or os.cpu_count() or 1  # macOS and Windows do not tell
    counts: list[int] = []  # of tasks of this ``srun`` step, on each node
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(repeats or 1)  # "4(x2),3": four on each of two nodes, then three
    node = os.environ.get("SLURM_NODEID", "0")
    # A batch script, and a machine without SLURM, is one task.
    tasks = max(1, counts[int(node)]) if node.isdigit() and int(node) < len(counts) else 1
    ranks_per_task = max(1, local_world_size // tasks)
    of_task = _positive(os.environ.get("SLURM_CPUS_PER_TASK", ""))
    if of_task:
        cores = min(of_task, bound) // ranks_per_task
    elif tasks > 1 and os.environ.get("SLURM_CPU_BIND_TYPE", "none").rstrip(":") not in ("", "none"):
        cores = bound // ranks_per_task
    else:
        cores = bound // local_world_size
    # A group may hold one task or the whole job: the job is the safe guess.
    for group, _ in control_groups("cpu", root):
        limit, _, period = read_text(group / "cpu.max").partition(" ")
        if not limit:  # the first version has two files; -1 is no limit
            limit, period = read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")
        if _positive(limit) and _positive(period):
            cores = min(cores, int(int(limit) / int(period) / local_world_size))
    return max(1, cores)


def _positive(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


def machine_name(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the name of the host, and what tells it from others of that name, such as containers."""
    container = ""
    with suppress(OSError):  # macOS, Windows
        container = os.readlink(root / "proc/self/ns/mnt")
    return socket.gethostname(), read_text(root / "proc/sys/kernel/random/boot_id"), container
