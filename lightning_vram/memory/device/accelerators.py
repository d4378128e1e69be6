"""What a kind of accelerator can do, by its module in torch (``torch.cuda``, ``torch.xpu``), not by its name."""

import os
import sys
import weakref
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_vram.memory.tracking.timeline import Phase
from lightning_vram.memory.units import MIB, format_bytes
from lightning_vram.private_names.dispatcher import FakeTensor

_HOSTS = ("cpu", "meta")
_STREAM_NAMES = ("Stream", "stream", "current_stream")
_PCI_NAMES = ("pci_domain_id", "pci_bus_id", "pci_device_id")
_STATISTICS_NAMES = (
    *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
    *("reset_peak_memory_stats", "empty_cache", "mem_get_info"),
)


def has_streams(kind: str) -> bool:
    """Whether devices of ``kind``, such as ``"cuda"``, copy in parallel with their computation, on other streams."""
    return kind not in _HOSTS and _has_all(getattr(torch, kind, None), _STREAM_NAMES)


def has_statistics(kind: str) -> bool:
    """Whether devices of ``kind`` have a caching allocator that tells what it holds, and held at most."""
    return kind not in _HOSTS and _has_all(getattr(torch, kind, None), _STATISTICS_NAMES)


def stream_id(device: torch.device) -> int:
    """Return which queue ``device`` works off now: what was queued in another may not be there yet. 0 on the host."""
    if not has_streams(device.type):
        return 0
    return int(torch.get_device_module(device).current_stream(device).stream_id)


def is_capturing(device: torch.device) -> bool:
    """Whether ``device`` records a graph now, whose replays run without the Python code around."""
    ask = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def has_native_bf16(kind: str) -> bool:
    """Whether devices of ``kind`` compute in bfloat16 by themselves. CPUs do, and are slower in float16."""
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if kind == "mps":
        return False
    ask = None if kind in _HOSTS else getattr(getattr(torch, kind, None), "is_bf16_supported", None)
    return ask is None or bool(ask())  # TPUs and the like do


def current_kind() -> str:
    """Return the kind of the accelerator at hand, ``"cpu"`` where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def pci_address(device: torch.device) -> str | None:
    """Return where ``device`` is on the PCI bus, as Linux names it; ``None`` if torch does not tell."""
    if device.type in _HOSTS:
        return None
    read = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    properties = read(device) if read is not None else None
    if not _has_all(properties, _PCI_NAMES):
        return None
    domain, bus, number = (int(getattr(properties, name)) for name in _PCI_NAMES)
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"


def can_pin_in_place(tensor: Tensor) -> bool:
    """Whether host memory may be pinned that is there already: CUDA alone can."""
    return torch.cuda.is_available() and not isinstance(tensor, FakeTensor)


def pin_in_place(tensor: Tensor) -> bool:
    """Pin host memory that is there already, as long as it lives. Returns whether it is."""
    if not can_pin_in_place(tensor):
        return False
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    if int(runtime.cudaHostRegister(address, tensor.nbytes, 0)) != 0:
        with suppress(RuntimeError):  # CUDA keeps the error for the next kernel, which would be blamed for it
            torch.ones(1, device="cuda")
        return False
    weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address)
    return True


def _has_all(holder: Any, names: tuple[str, ...]) -> bool:
    return all(hasattr(holder, name) for name in names)


@dataclass(frozen=True)
class AllocatorBytes:
    """What an allocator holds now and held at most since :func:`reset_peaks`."""

    allocated_bytes: int  # in tensors now
    reserved_bytes: int  # taken from the driver now; the part above ``allocated_bytes`` is cache
    peak_allocated_bytes: int  # most bytes in tensors at once
    peak_reserved_bytes: int  # most bytes taken from the driver at once: what ``nvidia-smi`` shows, less the context

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved but unused bytes: cache that only a request of a fitting size can use."""
        return self.reserved_bytes - self.allocated_bytes


def has_cache(device: torch.device) -> bool:
    """Whether tensors on ``device`` come from a caching allocator that :func:`empty_cache` can shrink."""
    return has_statistics(device.type)


def read_allocator(device: torch.device) -> AllocatorBytes:
    """Read the allocator of ``device``."""
    memory = _module(device)
    return AllocatorBytes(
        allocated_bytes=memory.memory_allocated(device),
        reserved_bytes=memory.memory_reserved(device),
        peak_allocated_bytes=memory.max_memory_allocated(device),
        peak_reserved_bytes=memory.max_memory_reserved(device),
    )


def reset_peaks(device: torch.device) -> None:
    """Let the peaks of ``device`` start again from what is held now. Every :class:`PeakWatch` notes them before."""
    memory = _module(device)
    for watch in list(_watches):
        watch.note(device)
    memory.reset_peak_memory_stats(device)


class PeakWatch:
    """Peaks of one's own, though an allocator has one set and others reset it; ``device`` has its index."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted = read_allocator(device)
        _watches.add(self)

    def restart(self) -> None:
        """Start again from what is held now."""
        reset_peaks(self._device)
        self._noted = read_allocator(self._device)

    def read(self) -> AllocatorBytes:
        """Return what is held now, and the most since the last :meth:`restart`."""
        now = read_allocator(self._device)
        return replace(
            now,
            peak_allocated_bytes=max(now.peak_allocated_bytes, self._noted.peak_allocated_bytes),
            peak_reserved_bytes=max(now.peak_reserved_bytes, self._noted.peak_reserved_bytes),
        )

    def note(self, device: torch.device) -> None:
        """Remember the peaks before those of ``device`` are reset."""
        if device == self._device:
            self._noted = self.read()


_watches: weakref.WeakSet[PeakWatch] = weakref.WeakSet()


def empty_cache(device: torch.device) -> int:
    """Return unused cached blocks of all devices of this kind to the driver; returns the bytes freed on ``device``."""
    if not has_cache(device):
        return 0
    memory = _module(device)
    reserved_bytes = int(memory.memory_reserved(device))
    memory.empty_cache()
    return reserved_bytes - int(memory.memory_reserved(device))


def _module(device: torch.device) -> ModuleType:
    if not has_cache(device):
        raise ValueError(f"device '{device}' has no caching allocator with statistics.")
    return torch.get_device_module(device)  # type: ignore[no-any-return]


class PhasePeaks:
    """Read and reset the allocator's peaks at each change of phase: others need a :class:`PeakWatch` meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._watch = PeakWatch(device)
        self._phase: Phase | None = None
        self.by_phase: dict[Phase, int] = {}
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0

    def switch(self, phase: Phase) -> None:
        """End the running phase and begin another."""
        self.read()
        self._phase = phase

    def read(self) -> AllocatorBytes:
        """Add up to now to the running phase; what was before the first phase counts for the whole only."""
        now = self._watch.read()
        if self._phase is not None:
            self.by_phase[self._phase] = max(self.by_phase.get(self._phase, 0), now.peak_allocated_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, now.peak_allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, now.peak_reserved_bytes)
        self._watch.restart()
        return now


class ProcessLimit:
    """Limit the bytes that PyTorch reserves in this process on a device (with its index), until :meth:`remove`."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        if not can_limit(device):
            raise ValueError(f"device '{device}' does not support a memory limit per process.")
        self._device = device
        memory = torch.get_device_module(device)
        self._before: float | None = limited_share(device)
        memory.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes(device)), device)

    def remove(self) -> None:
        """Put back the limit that was there. Calling it again does nothing."""
        if self._before is not None:
            torch.get_device_module(self._device).set_per_process_memory_fraction(self._before, self._device)
            self._before = None


def can_limit(device: torch.device) -> bool:
    """Whether :class:`ProcessLimit` can be had on ``device``."""
    return has_statistics(device.type) and hasattr(torch.get_device_module(device), "set_per_process_memory_fraction")


def limited_share(device: torch.device) -> float:
    """Return which part of ``device`` this process may take."""
    read = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)  # XPU: since torch 2.10
    return 1.0 if read is None else float(read(device))


def total_bytes(device: torch.device) -> int:
    """Return what ``device`` has in all, for all processes."""
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def free_device_bytes(device: torch.device) -> int | None:
    """Return what tensors of this process can still get on ``device`` (with its index), its cache included.

    ``None`` if no allocator tells (the CPU, MPS).
    """
    if not has_cache(device):
        return None
    free_bytes, all_bytes = torch.get_device_module(device).mem_get_info(device)
    now = read_allocator(device)
    allowed_bytes = int(all_bytes * limited_share(device))
    return int(max(0, min(free_bytes + now.fragmentation_bytes, allowed_bytes - now.allocated_bytes)))


# Read when CUDA's allocator is used first, whatever was imported before.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch 2.9.1 did not read the first, which is the newer
_OTHER_VARIABLES = ("PYTORCH_HIP_ALLOC_CONF",)  # of a ROCm build
SETTING = "expandable_segments:True"
_WORTH_SAYING = 1.1, 256 * MIB  # reserved of allocated, and beyond it


def configure_allocator(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Enable expandable segments of CUDA's caching allocator, to avoid fragmentation.

    Use it if reserved memory is much larger than allocated memory. It sets the environment of this process and of those
    that it starts. Call it before the first tensor is on the GPU; ``lightning-vram fit`` does. A setting of your own
    wins: export ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False`` for programs that share CUDA tensors between
    processes, or whose CUDA graphs do not work with expandable segments. Without CUDA, on ROCm and under ``win32`` it
    does nothing.

    Args:
        environment: Mapping that receives the setting.

    Returns:
        Whether expandable segments are enabled: ``False`` if you have set something else, or they are not available.

    Raises:
        RuntimeError: If CUDA's allocator is already in use and has read its settings.

    Example:
        >>> configure_allocator({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"})
        False
    """
    if has_expandable_segments(environment):
        return True
    has_own = any(environment.get(name) for name in (*VARIABLES, *_OTHER_VARIABLES))
    if has_own or sys.platform == "win32" or torch.version.cuda is None:
        return False
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "configure_allocator() came too late: CUDA has already read its settings. Call it before the first tensor "
            f"is on the GPU, or start the program with {VARIABLES[1]}={SETTING}."
        )
    environment.update(dict.fromkeys(VARIABLES, SETTING))
    return True


def has_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for expandable segments."""
    return any(SETTING in environment.get(name, "").replace(" ", "") for name in (*VARIABLES, *_OTHER_VARIABLES))


def fragmentation_advice(allocated_bytes: int, reserved_bytes: int) -> str | None:
    """Warn of a run that reserved (peak bytes) much more than it ever allocated (peak bytes); ``None``: no warning."""
    ratio, beyond_bytes = _WORTH_SAYING
    is_little = reserved_bytes <= ratio * allocated_bytes or reserved_bytes - allocated_bytes < beyond_bytes
    if is_little or torch.version.cuda is None or has_expandable_segments():
        return None
    return (
        f"{format_bytes(reserved_bytes)} were reserved, but at most {format_bytes(allocated_bytes)} allocated: "
        "fragmentation. Call lightning_vram.configure_allocator() first in the program, or start it with "
        f"{VARIABLES[1]}={SETTING}."
    )
