"""How many processor cores a rank may use for work on the host, such as an optimizer step there."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.memory.host.control_groups import control_groups, read_text
from lightning_vram.memory.host.numa import own_cores


def cores_of_rank(local_world_size: int, root: Path = Path("/")) -> int:
    """Count the cores that this process may keep busy while the other ranks of this machine do the same: at least 1.

    What SLURM gave the task, shared by its ranks; without SLURM the cores that this process may run on, shared by all
    local ranks. Never more than this rank's share of the processor time of its control groups. ``OMP_NUM_THREADS`` does
    not count: ``torchrun`` sets it to 1. A rank that ``numactl`` bound gets a share of its own cores: too few, if any.

    Example:
        >>> cores_of_rank(local_world_size=10_000)
        1
    """
    check_positive_int("cores_of_rank(local_world_size)", local_world_size)
    bound = len(own_cores()) or os.cpu_count() or 1  # macOS and Windows do not tell
    tasks = _slurm_tasks_here()
    ranks_per_task = max(1, local_world_size // tasks)
    of_task = _positive(os.environ.get("SLURM_CPUS_PER_TASK", ""))
    if of_task:
        cores = min(of_task, bound) // ranks_per_task
    elif tasks > 1 and os.environ.get("SLURM_CPU_BIND_TYPE", "none").rstrip(":") not in ("", "none"):
        cores = bound // ranks_per_task
    else:
        cores = bound // local_world_size
    # A group may hold one task or the whole job: the job is the safe guess.
    groups = (group for group, _ in control_groups("cpu", root))
    quotas = [int(quota / local_world_size) for group in groups for quota in _quota(group)]
    return max(1, min([cores, *quotas]))


def _slurm_tasks_here() -> int:
    """Tasks of this ``srun`` step on this node; a batch script, and a machine without SLURM, is one task."""
    counts: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(repeats or 1)  # "4(x2),3": four on each of two nodes, then three
    node = os.environ.get("SLURM_NODEID", "0")
    return max(1, counts[int(node)]) if node.isdigit() and int(node) < len(counts) else 1


def _quota(group: Path) -> Iterator[float]:
    """Yield the cores' worth of time that a group may use, if it says so."""
    limit, _, period = read_text(group / "cpu.max").partition(" ")
    if not limit:  # the first version has two files; -1 is no limit
        limit, period = read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")
    if _positive(limit) and _positive(period):
        yield int(limit) / int(period)


def _positive(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0
