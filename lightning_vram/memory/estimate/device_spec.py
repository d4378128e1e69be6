"""What an estimate needs to know of a GPU, and the file that stores it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_vram.argument_checks import check_positive_int

_FORMAT = 1  # of the file


@dataclass(frozen=True)
class DeviceSpec:
    """Properties of a GPU, from its maker or measured by ``lightning-vram calibrate``.

    Args:
        name: Name of the GPU.
        memory_bytes: Memory that the driver reports.
        memory_source: Source of ``memory_bytes``.
        bandwidth_bytes_per_s: Memory bandwidth.
        flops_per_s: Dense operations per second by format: ``"fp32"``, ``"tf32"``, ``"fp16"``, ``"bf16"``, ``"int8"``,
            ``"fp8"``; sums in float32, as in PyTorch. Formats that the GPU does not support are left out.
        bus_bytes_per_s: PCIe bandwidth between host and GPU in one direction.
        capability: CUDA compute capability; ``None`` for other GPUs, or if unknown.
        num_multiprocessors: Number of multiprocessors (compute units).
        context_bytes: Measured memory of the CUDA context. ``None``: a default for the GPU.
        workspace_bytes: Measured cuBLAS workspace of one handle. ``None``: a default for the GPU.
        is_workspace_kept: Whether cuBLAS keeps that workspace, measured. ``None``: a default for the GPU.

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
    """Write a GPU to a JSON file, which :func:`read_calibration` reads."""
    Path(path).write_text(json.dumps({"format": _FORMAT, **asdict(spec)}, indent=2) + "\n")


def read_calibration(path: str | Path) -> DeviceSpec:
    """Read what ``lightning-vram calibrate`` has written; anything else is a ``ValueError``."""
    try:
        values: Any = json.loads(Path(path).read_text())
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            raise ValueError(f"it is not of format {_FORMAT}")
        if unknown := values.keys() - {one.name for one in fields(DeviceSpec)}:
            raise ValueError(f"it has {', '.join(sorted(unknown))}")
        capability = values.pop("capability", None)
        return DeviceSpec(**values, capability=None if capability is None else tuple(capability))
    except OSError as error:
        raise ValueError(f"the file {str(path)!r} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError) as error:
        why = "it is not JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else error
        raise ValueError(
            f"{str(path)!r} is not a file that `lightning-vram calibrate` wrote for this version: {why}."
        ) from error
