"""How much memory of the host a process may still take before the kernel kills it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_vram.memory.host.control_groups import control_groups, read_text
from lightning_vram.memory.units import KIB


@dataclass(frozen=True)
class _Files:
    """What the files of a control group, and the lines of its ``memory.stat``, are called."""

    limits: tuple[str, ...]
    usage: str
    inactive: str
    active: str


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file", "active_file")  # high: it is slowed down


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Estimate how much more memory this process can take: the least that the kernel and any control group leave.

    Page cache that can be dropped counts as available: of a control group, half of what was used more than once.
    ``None`` where the system does not tell (Windows); on macOS all memory of the machine counts.
    """
    machine = _meminfo_bytes(root, "MemAvailable")
    if machine is None:
        machine = _sysconf_bytes("SC_AVPHYS_PAGES") or _sysconf_bytes("SC_PHYS_PAGES")
    rooms = [room for room in (machine, *_control_group_rooms(root)) if room is not None]
    return min(rooms) if rooms else None


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


def _control_group_rooms(root: Path) -> Iterator[int | None]:
    for group, version in control_groups("memory", root):
        yield _room(group, _V2 if version == 2 else _V1)


def _room(group: Path, files: _Files) -> int | None:
    limits = [limit for name in files.limits if (limit := _number(group / name)) is not None]
    usage = _number(group / files.usage)
    if not limits or usage is None:
        return None  # "max": no limit
    cache = 0
    for line in read_text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in (files.inactive, files.active) and value.strip().isdigit():
            cache += int(value) if key == files.inactive else int(value) // 2
    return max(0, min(limits) - usage + cache)


def _number(file: Path) -> int | None:
    text = read_text(file)
    return int(text) if text.isdigit() else None
