"""What an estimate needs to know of a GPU, and the file that stores it."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.memory.units import MIB

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
        shares_host_memory: Whether GPU and CPU share memory (GB10, Jetson, Apple). Plans then contain no offload.

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
    shares_host_memory: bool = False

    def __post_init__(self) -> None:
        check_positive_int("DeviceSpec(memory_bytes)", self.memory_bytes)


def write_calibration(spec: DeviceSpec, path: str | Path) -> None:
    """Write a GPU to a JSON file, which :func:`read_calibration` reads."""
    Path(path).write_text(json.dumps({"format": _FORMAT, **asdict(spec)}, indent=2) + "\n")


def read_calibration(path: str | Path) -> DeviceSpec:
    """Read what ``lightning-vram calibrate`` has written; anything else is a ``ValueError``."""
    try:
        values = json.loads(Path(path).read_text())
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            raise ValueError(f"it is not of format {_FORMAT}")
        capability = values.pop("capability", None)
        return DeviceSpec(**values, capability=None if capability is None else tuple(capability))
    except OSError as error:
        raise ValueError(f"the file {str(path)!r} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{str(path)!r} is not a file that `lightning-vram calibrate` wrote for this version: {error}."
        ) from error


_GIGA, _TERA = 1e9, 1e12
_SEPARATORS = re.compile(r"[^a-z0-9]")
_LEFT_OUT = re.compile(r"nvidia|geforce|tesla|quadro|rtx|amd|instinct|radeon|intelr?|datacenter|gpu|generation|edition")
_MAX_CLOSE, _SIMILARITY = 6, 0.5


def find_device(name: str) -> DeviceSpec:
    """Return a GPU by its name as people and drivers write it, or from a file of ``lightning-vram calibrate``.

    Example:
        >>> find_device("rtx4090").name
        'RTX 4090'
    """
    if name.endswith(".json"):
        return read_calibration(name)
    found = _names().get(_short(name))
    if found is None:
        close = f" Did you mean {', '.join(_close_to(name))}?" if _close_to(name) else ""
        raise ValueError(
            f"device {name!r} is unknown.{close} `lightning-vram estimate --device list` prints all. For another GPU: "
            "DeviceSpec(name=..., memory_bytes=...), or --device NAME --device_memory 24GiB. For one that shares "
            "memory with the CPU (Apple): DeviceSpec(..., shares_host_memory=True)."
        )
    return found


@cache
def known_devices() -> tuple[DeviceSpec, ...]:
    """Return all cards that are known by name."""
    return tuple(dict.fromkeys(_names().values()))


def describe_this_device(kind: str | None = None) -> DeviceSpec:
    """Describe this machine's accelerator, of type ``kind``: memory by its driver, the rest by its name.

    A ``RuntimeError`` if no GPU reports its memory.
    """
    import torch  # seconds, of which a list of names needs nothing

    from lightning_vram.memory.device import accelerators

    kind = kind or accelerators.current_kind()
    if not accelerators.has_statistics(kind):
        raise RuntimeError("no GPU that reports its memory was found. Name a device instead, such as rtx4090.")
    module: Any = torch.get_device_module(kind)
    device = torch.device(kind, module.current_device() if hasattr(module, "current_device") else 0)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else "Apple GPU"
    properties, is_shared = accelerators.properties_of(device), accelerators.shares_host_memory(device)
    known = _names().get(_short(name), DeviceSpec(name, 1))
    return replace(
        known,
        name=name,
        memory_bytes=accelerators.total_bytes(device),
        memory_source="the driver",
        bus_bytes_per_s=None if is_shared else known.bus_bytes_per_s,
        shares_host_memory=is_shared,
        capability=(properties.major, properties.minor) if hasattr(properties, "major") else known.capability,
        num_multiprocessors=getattr(properties, "multi_processor_count", known.num_multiprocessors),
    )


@cache
def _names() -> dict[str, DeviceSpec]:
    """All cards by all their names, each without what people leave out."""
    data = json.loads((files("lightning_vram.memory.estimate") / "known_devices.json").read_text())
    found = {}
    for card in data["devices"]:
        spec = DeviceSpec(
            name=card["name"],
            memory_bytes=card["memory_mib"] * MIB,
            memory_source=card["memory_source"],
            bandwidth_bytes_per_s=card["bandwidth_gb_s"] * _GIGA,
            flops_per_s={name: rate * _TERA for name, rate in card["tflops"].items()},
            bus_bytes_per_s=data["buses_gb_s"][card["bus"]] * _GIGA if "bus" in card else None,
            shares_host_memory="bus" not in card,
            capability=tuple(card["capability"]) if "capability" in card else None,
            num_multiprocessors=card["num_multiprocessors"],
        )
        for name in (card["name"], *card.get("aliases", ())):
            found[_short(name)] = spec
    return found


def _short(name: str) -> str:
    return _LEFT_OUT.sub("", _SEPARATORS.sub("", name.lower()))


def _close_to(name: str) -> list[str]:
    """Names of a few cards that begin alike, or else are spelled alike."""
    short = _short(name)
    begins = [spec.name for key, spec in _names().items() if short and key.startswith(short)]
    spelled = {_SEPARATORS.sub("", spec.name.lower()): spec.name for spec in known_devices()}
    alike = difflib.get_close_matches(_SEPARATORS.sub("", name.lower()), spelled, _MAX_CLOSE, _SIMILARITY)
    return list(dict.fromkeys(begins or [spelled[key] for key in alike]))[:_MAX_CLOSE]
