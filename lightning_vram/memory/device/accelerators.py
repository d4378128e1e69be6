"""What a kind of accelerator can do, by its module in torch (``torch.cuda``, ``torch.mps``), not by its name.

ROCm has the module and the names of CUDA. ``torch.xpu`` has those names as well; ``torch.mps`` has its own.
"""

import os
import sys
import weakref
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_vram.memory.host import (
    available_host_bytes,
    is_tegra,
    is_wsl,
    reclaimable_gpu_bytes,
    total_host_bytes,
)
from lightning_vram.memory.tracking.timeline import Phase
from lightning_vram.memory.units import MIB, format_bytes
from lightning_vram.private_names.dispatcher import FakeTensor

_HOSTS = ("cpu", "meta")
# Of the last one, torch.mps has none: its streams, since torch 2.15, have events that refuse them.
_STREAM_NAMES = ("Stream", "stream", "current_stream", "current_device")
_PCI_NAMES = ("pci_domain_id", "pci_bus_id", "pci_device_id")
_STATISTICS_NAMES = (
    *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
    *("reset_peak_memory_stats", "empty_cache", "mem_get_info"),
)
_METAL_NAMES = (
    *("current_allocated_memory", "driver_allocated_memory", "recommended_max_memory", "empty_cache"),
    "set_per_process_memory_fraction",
)


def has_streams(kind: str) -> bool:
    """Whether devices of ``kind``, such as ``"cuda"``, copy in parallel with their computation, on other streams."""
    return kind not in _HOSTS and _has_all(getattr(torch, kind, None), _STREAM_NAMES)


def has_statistics(kind: str) -> bool:
    """Whether devices of ``kind`` have a caching allocator that reports what it holds."""
    return _has_peaks(kind) or _is_metal(kind)


def _has_peaks(kind: str) -> bool:
    return kind not in _HOSTS and _has_all(getattr(torch, kind, None), _STATISTICS_NAMES)


def _is_metal(kind: str) -> bool:
    return kind not in _HOSTS and not _has_peaks(kind) and _has_all(getattr(torch, kind, None), _METAL_NAMES)


def shares_host_memory(device: torch.device) -> bool:
    """Whether ``device`` computes in the memory of the host, so that moving tensors to the host frees nothing.

    Apple GPUs do, and integrated GPUs: NVIDIA's GB10 and Jetson, APUs of AMD and Intel. An APU for which the BIOS
    reserves more memory than it leaves to the host does not: the reserved part is no memory of the host.
    """
    if _is_metal(device.type):
        return True
    properties = properties_of(device)
    if not (getattr(properties, "is_integrated", False) or getattr(properties, "is_integrated_gpu", False)):
        return False
    host_bytes = None if torch.version.hip is None else total_host_bytes()
    return host_bytes is None or int(properties.total_memory) <= host_bytes


def properties_of(device: torch.device) -> Any:
    """Return what the driver knows of ``device``; ``None``: nothing, as of hosts and Apple GPUs."""
    read = None if device.type in _HOSTS else getattr(getattr(torch, device.type, None), "get_device_properties", None)
    return None if read is None else read(device)


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
    properties = properties_of(device)
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


class _Allocator:
    """The allocator of CUDA, ROCm and XPU. The module is looked up each time: estimates replace it."""

    def read(self, device: torch.device) -> AllocatorBytes:
        memory: Any = torch.get_device_module(device)
        return AllocatorBytes(
            allocated_bytes=memory.memory_allocated(device),
            reserved_bytes=memory.memory_reserved(device),
            peak_allocated_bytes=memory.max_memory_allocated(device),
            peak_reserved_bytes=memory.max_memory_reserved(device),
        )

    def reset_peaks(self, device: torch.device) -> None:
        torch.get_device_module(device).reset_peak_memory_stats(device)

    def memory_info(self, device: torch.device) -> tuple[int, int]:
        """Return free and total bytes. The driver counts page cache as used, though the kernel drops it for tensors."""
        memory: Any = torch.get_device_module(device)
        free_bytes, all_bytes = map(int, memory.mem_get_info(device))
        if shares_host_memory(device):
            rest_bytes = all_bytes - int(memory.memory_reserved(device))
            return max(free_bytes, min(available_host_bytes() or 0, rest_bytes)), all_bytes
        address = pci_address(device) if torch.version.hip is None else None
        cached_bytes = 0 if address is None else reclaimable_gpu_bytes(address)
        return min(free_bytes + cached_bytes, all_bytes), all_bytes

    def limit(self, device: torch.device) -> float:
        """Return which part of the device this process may take; 0: no limit."""
        read = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
        return 1.0 if read is None else float(read(device))

    def set_limit(self, device: torch.device, share: float) -> None:
        torch.get_device_module(device).set_per_process_memory_fraction(share, device)


class _MetalAllocator(_Allocator):
    """The allocator of Apple GPUs, of which there is one. It counts no peaks: they are the most that was ever read."""

    def __init__(self) -> None:
        self._peaks = (0, 0)
        self._limit: float | None = None  # that was set here: torch.mps does not report it

    def read(self, device: torch.device) -> AllocatorBytes:
        memory: Any = torch.get_device_module(device)
        allocated_bytes = int(memory.current_allocated_memory())
        reserved_bytes = max(allocated_bytes, int(memory.driver_allocated_memory()))
        self._peaks = max(allocated_bytes, self._peaks[0]), max(reserved_bytes, self._peaks[1])
        return AllocatorBytes(allocated_bytes, reserved_bytes, *self._peaks)

    def reset_peaks(self, device: torch.device) -> None:
        self._peaks = (0, 0)
        self.read(device)

    def memory_info(self, device: torch.device) -> tuple[int, int]:
        memory: Any = torch.get_device_module(device)
        all_bytes = int(memory.recommended_max_memory())
        rest_bytes = max(0, all_bytes - self.read(device).reserved_bytes)
        available_bytes = available_host_bytes()
        return rest_bytes if available_bytes is None else min(available_bytes, rest_bytes), all_bytes

    def limit(self, device: torch.device) -> float:
        default = os.environ.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO") or _METAL_LIMIT
        return float(default) if self._limit is None else self._limit

    def set_limit(self, device: torch.device, share: float) -> None:
        torch.get_device_module(device).set_per_process_memory_fraction(share)
        self._limit = share


_METAL_LIMIT = 1.7  # of the recommended memory: aten/src/ATen/mps/MPSAllocator.h, default_high_watermark_ratio
_GENERAL, _METAL = _Allocator(), _MetalAllocator()


def _allocator(device: torch.device) -> _Allocator:
    if not has_cache(device):
        raise ValueError(f"device '{device}' has no caching allocator with statistics.")
    return _METAL if _is_metal(device.type) else _GENERAL


def has_cache(device: torch.device) -> bool:
    """Whether tensors on ``device`` come from a caching allocator that :func:`empty_cache` can shrink."""
    return has_statistics(device.type)


def has_growing_cache(device: torch.device) -> bool:
    """Whether the cache of ``device`` keeps blocks of all sizes that were ever used, as on Apple GPUs."""
    return _is_metal(device.type)


def counts_peaks(device: torch.device) -> bool:
    """Whether the allocator of ``device`` counts peaks. If not, the peaks returned here are the largest values read."""
    return _has_peaks(device.type)


def read_allocator(device: torch.device) -> AllocatorBytes:
    """Read the allocator of ``device``."""
    return _allocator(device).read(device)


def reset_peaks(device: torch.device) -> None:
    """Let the peaks of ``device`` start again from what is held now. Every :class:`PeakWatch` notes them before."""
    allocator = _allocator(device)
    for watch in list(_watches):
        watch.note(device)
    allocator.reset_peaks(device)


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
    reserved_bytes = read_allocator(device).reserved_bytes
    torch.get_device_module(device).empty_cache()
    return reserved_bytes - read_allocator(device).reserved_bytes


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
        self._before: float | None = _allocator(device).limit(device)
        _allocator(device).set_limit(device, min(1.0, limit_bytes / total_bytes(device)))

    def remove(self) -> None:
        """Put back the limit that was there. Calling it again does nothing."""
        if self._before is not None:
            _allocator(self._device).set_limit(self._device, self._before)
            self._before = None


def can_limit(device: torch.device) -> bool:
    """Whether :class:`ProcessLimit` can be had on ``device``."""
    return has_cache(device) and hasattr(torch.get_device_module(device), "set_per_process_memory_fraction")


def limited_share(device: torch.device) -> float:
    """Return which part of ``device`` this process may take, at most 1."""
    return min(1.0, _allocator(device).limit(device) or 1.0)


def total_bytes(device: torch.device) -> int:
    """Return what ``device`` has in all, for all processes."""
    return memory_info(device)[1]


def memory_info(device: torch.device) -> tuple[int, int]:
    """Return the bytes of ``device`` that are free, and all. Free is what the host has, where both share memory."""
    return _allocator(device).memory_info(device)


def free_device_bytes(device: torch.device) -> int | None:
    """Return what tensors of this process can still get on ``device`` (with its index), its cache included.

    ``None`` if no allocator reports it (the CPU).
    """
    if not has_cache(device):
        return None
    free_bytes, all_bytes = memory_info(device)
    now = read_allocator(device)
    allowed_bytes = int(all_bytes * limited_share(device))
    return int(max(0, min(free_bytes + now.fragmentation_bytes, allowed_bytes - now.allocated_bytes)))


# Read when CUDA's allocator is used first, whatever was imported before.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch 2.9.1 did not read the first, which is the newer
_OTHER_VARIABLES = ("PYTORCH_HIP_ALLOC_CONF",)  # of a ROCm build
SETTING = "expandable_segments:True"
_RESERVED_RATIO = 1.1  # of allocated bytes: below that, a warning is not worth it


def configure_allocator(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Enable expandable segments of CUDA's caching allocator, to avoid fragmentation.

    Use it if reserved memory is much larger than allocated memory. It sets the environment of this process and of those
    that it starts. Call it before the first tensor is on the GPU; ``lightning-vram fit`` does. A setting of your own
    wins: export ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False`` for programs that share CUDA tensors between
    processes, or whose CUDA graphs do not work with expandable segments. It does nothing without CUDA, on Windows, and
    where they are known to fail: WSL2 (https://github.com/pytorch/pytorch/issues/192330), Jetson
    (https://github.com/unslothai/unsloth-zoo/pull/1235) and ROCm (https://github.com/pytorch/pytorch/issues/192259).
    Export the setting to use them there.

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
    if has_own or not supports_expandable_segments():
        return False
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "configure_allocator() came too late: CUDA has already read its settings. Call it before the first tensor "
            f"is on the GPU, or start the program with {VARIABLES[1]}={SETTING}."
        )
    environment.update(dict.fromkeys(VARIABLES, SETTING))
    return True


def supports_expandable_segments(root: Path = Path("/")) -> bool:
    """Whether expandable segments are known to work with this build on this machine. The driver is not asked."""
    is_cuda = torch.version.cuda is not None and sys.platform != "win32"
    return is_cuda and not is_wsl(root) and not is_tegra(root)


def has_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for expandable segments."""
    return any(SETTING in environment.get(name, "").replace(" ", "") for name in (*VARIABLES, *_OTHER_VARIABLES))


def fragmentation_advice(device: torch.device, allocated_bytes: int, reserved_bytes: int) -> str | None:
    """Warn of a run that reserved (peak bytes) much more than it ever allocated (peak bytes); ``None``: no warning."""
    if not holds_much_more(allocated_bytes, reserved_bytes) or has_expandable_segments():
        return None
    helps = "Release the cache in training: callbacks=[EmptyCache(every_n_batches=...)]."
    if _is_metal(device.type):
        helps = "Release the cache when it grows: callbacks=[EmptyCache()]."
    elif supports_expandable_segments():
        helps = (
            "Call lightning_vram.configure_allocator() first in the program, or start it with "
            f"{VARIABLES[1]}={SETTING}."
        )
    return (
        f"{format_bytes(reserved_bytes)} were reserved, but at most {format_bytes(allocated_bytes)} allocated: "
        f"fragmentation. {helps}"
    )


def holds_much_more(
    allocated_bytes: int, reserved_bytes: int, ratio: float = _RESERVED_RATIO, beyond_bytes: int = 256 * MIB
) -> bool:
    """Whether an allocator holds over ``ratio`` times what tensors need, and over ``beyond_bytes`` more."""
    return reserved_bytes > ratio * allocated_bytes and reserved_bytes - allocated_bytes >= beyond_bytes
