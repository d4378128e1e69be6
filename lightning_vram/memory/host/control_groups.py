"""The control groups of Linux that this process is in: what a container or a job may use."""

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each control group that limits this process, innermost first, and its version (1 or 2).

    Folders that do not exist are among them: in a container the mount itself may be the group.
    """
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
