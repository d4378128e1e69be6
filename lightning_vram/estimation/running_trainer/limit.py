"""What a memory limit for a run means on a device: all that is free, bytes, or a share."""

import torch

from lightning_vram.memory.device.process_limit import can_limit, total_bytes
from lightning_vram.memory.device.room import device_room
from lightning_vram.memory.host.available import available_host_bytes
from lightning_vram.memory.units import parse_bytes, parse_limit

AUTO = "auto"


def check_limit(name: str, limit: object) -> None:
    """Refuse what is no limit: ``"auto"``, bytes of 1 MiB or more, text with a unit, or a share above 0 up to 1."""
    if limit == AUTO:
        return
    if isinstance(limit, float):
        if not 0 < limit <= 1:
            raise ValueError(f"{name} as a share of the device must be above 0 and at most 1, got {limit}.")
    elif isinstance(limit, bool) or not isinstance(limit, int | str):
        kind = type(limit).__name__
        raise TypeError(
            f"{name} must be 'auto', bytes, text such as '20GiB', or a share, got {limit!r} of type {kind}."
        )
    else:
        parse_limit(limit, name)


def limit_bytes(name: str, limit: int | float | str, device: torch.device) -> int | None:
    """Return a limit in bytes; ``None``: there is none. Shares are of the device, or of what the host has available."""
    if limit == AUTO:
        return None
    if isinstance(limit, float):
        all_bytes = total_bytes(device) if can_limit(device) else available_host_bytes() or 0
        return int(limit * all_bytes)
    return parse_bytes(limit, name)


def free_bytes_of(device: torch.device, num_processes: int) -> int | None:
    """Return how much more of ``device`` this process can have; ``None`` if the device does not report it."""
    if device.type == "cpu":
        available_bytes = available_host_bytes()
        return None if available_bytes is None else available_bytes // num_processes
    room = device_room(device)
    return None if room is None else room.room_bytes()
