"""Which machine this is, so that processes know which others share its memory."""

import os
import socket
from contextlib import suppress
from pathlib import Path

from lightning_vram.memory.host.control_groups import read_text


def machine_name(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the name of the host, and what tells it from others of that name, such as containers."""
    container = ""
    with suppress(OSError):  # macOS, Windows
        container = os.readlink(root / "proc/self/ns/mnt")
    return socket.gethostname(), read_text(root / "proc/sys/kernel/random/boot_id"), container
