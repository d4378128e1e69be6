"""What an estimate needs to know of a card, and the file that keeps it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_vram.argument_checks import check_positive_int

_FORMAT = 1  # of the file


@dataclass(frozen=True)
class DeviceSpec:
    """A card, as its makers or ``lightning-vram calibrate`` describe it.

    Args:
        name: Of the card.
        memory_bytes: That the driver says it has.
        memory_source: Who says so.
        bandwidth_bytes_per_s: Of its memory.
        flops_per_s: Dense operations per second by format: ``"fp32"``, ``"tf32"``, ``"fp16"``, ``"bf16"``, ``"int8"``,
            ``"fp8"``; sums in float32, as PyTorch has them. What the card lacks is not there.
        bus_bytes_per_s: Between host and card, one way.
        capability: Compute capability; ``None`` on cards that have none, or if it is not known.
        num_multiprocessors: Or what its maker calls them.
        context_bytes: Measured: what the driver keeps for a process. ``None`` takes it from ``workspaces.py``.
        workspace_bytes: Measured: what cuBLAS takes for one handle. ``None`` takes it from ``workspaces.py``.
        is_workspace_kept: Measured: whether cuBLAS keeps that. ``None`` takes it from ``workspaces.py``.

    Raises:
        TypeError: If ``memory_bytes`` is not an ``int``.
        ValueError: If it is not positive.
    """

    name: str
    memory_bytes: int
    memory_source: str = "given"
    bandwidth_bytes_per_s: float | None = None
    flops_per_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    bus_bytes_per_s: float | None = None
    capability: tuple[int, int] | None = None
    num_multiprocessors: int | None = None
    context_bytes: int | None = None
    workspace_bytes: int | None = None
    is_workspace_kept: bool | None = None

    def __post_init__(self) -> None:
        check_positive_int("DeviceSpec(memory_bytes)", self.memory_bytes)


def write_calibration(spec: DeviceSpec, path: str | Path) -> None:
    """Write a card to a file of JSON, which :func:`read_calibration` reads."""
    Path(path).write_text(json.dumps({"format": _FORMAT, **asdict(spec)}, indent=2) + "\n")


def read_calibration(path: str | Path) -> DeviceSpec:
    """Read what ``lightning-vram calibrate`` has written.

    Raises:
        ValueError: If the file is not there, or is not of that form.
    """
    try:
        values: Any = json.loads(Path(path).read_text())
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            raise ValueError(f"it is not of format {_FORMAT}")
        if unknown := values.keys() - {one.name for one in fields(DeviceSpec)}:
            raise ValueError(f"it has {', '.join(sorted(unknown))}")
        capability = values.pop("capability", None)
        return DeviceSpec(**values, capability=None if capability is None else tuple(capability))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{str(path)!r} is not a file that `lightning-vram calibrate` wrote for this version: {error}."
        ) from error
