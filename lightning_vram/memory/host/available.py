"""How much memory of the host a process may still take before the kernel kills it."""

import os
from pathlib import Path

from lightning_vram.memory.host.control_groups import control_groups, read_text
from lightning_vram.memory.units import KIB

# By version of control groups: files of limits (high: it is slowed down) and of use, keys of inactive and active cache.
_NAMES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file", "active_file"),
}


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Estimate how much more memory this process can take: the least that the kernel and any control group leave.

    Page cache that can be dropped counts as available: of a control group, half of what was used more than once.
    ``None`` where the system does not tell (Windows); on macOS all memory of the machine counts.
    """
    machine = _meminfo_bytes(root, "MemAvailable")
    if machine is None:
        machine = _sysconf_bytes("SC_AVPHYS_PAGES") or _sysconf_bytes("SC_PHYS_PAGES")
    groups = (_free_bytes(group, version) for group, version in control_groups("memory", root))
    return min((one for one in (machine, *groups) if one is not None), default=None)


def free_swap_bytes(root: Path = Path("/")) -> int:
    """Return the free swap space, as far as the kernel tells: what is not pinned may go there."""
    return _meminfo_bytes(root, "SwapFree") or 0


def _meminfo_bytes(root: Path, name: str) -> int | None:
    for line in read_text(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if key == name and value.split()[0].isdigit():
            return int(value.split()[0]) * KIB
    return None


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
