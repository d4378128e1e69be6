"""What a kind of accelerator can do, by its module in torch (``torch.cuda``, ``torch.xpu``), not by its name."""

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_vram.private_names.torch.dispatch import FakeTensor

_HOSTS = ("cpu", "meta")
_STREAM_NAMES = ("Stream", "stream", "current_stream")
_PCI_NAMES = ("pci_domain_id", "pci_bus_id", "pci_device_id")
_STATISTICS_NAMES = (
    *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
    *("reset_peak_memory_stats", "empty_cache", "mem_get_info"),
)


def has_streams(kind: str) -> bool:
    """Whether devices of ``kind``, such as ``"cuda"``, copy beside their computation, on streams of their own."""
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
