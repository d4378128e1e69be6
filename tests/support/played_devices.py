"""Devices that are not here: what their modules in torch answer is played, and the run computes on the CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_vram.memory.device import accelerators
from lightning_vram.memory.units import GIB

MPS_MESSAGE = (
    "MPS backend out of memory (MPS allocated: {held:.2f} GiB, other allocations: {other:.2f} GiB, max allowed: "
    "{allowed:.2f} GiB). Tried to allocate {asked:.2f} GiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 "
    "to disable upper limit for memory allocations (may cause system failure)."
)


class PlayedStrategy(SingleDeviceStrategy):
    """A run that takes the CPU for the device."""

    def setup_environment(self) -> None: ...

    def model_to_device(self) -> None: ...

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return batch


class PlayedDevice:
    """Device 0 of a kind: bytes that its driver and allocator report, and what is asked of them."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str, total: int, available: int, **properties: Any) -> None:
        self.device, self.total, self.available = torch.device(kind, 0), total, available
        self.free = total
        self.live = self.reserved = self.peak = 0
        self.limits: list[float] = []
        self.releases = 0
        general = {
            "memory_allocated": lambda device: self.live,
            "memory_reserved": lambda device: self.reserved,
            "max_memory_allocated": lambda device: self.peak,
            "max_memory_reserved": lambda device: self.reserved,
            "reset_peak_memory_stats": self._reset,
            "mem_get_info": lambda device=None: (self.free, self.total),
            "get_device_name": lambda device=None: properties.get("name", "played"),
            "current_device": lambda: 0,
            "get_device_properties": lambda device=None: SimpleNamespace(total_memory=total, **properties),
            "set_per_process_memory_fraction": lambda share, device: self.limits.append(share),
            "get_per_process_memory_fraction": lambda device: self.limits[-1] if self.limits else 1.0,
        }
        metal = {
            "current_allocated_memory": lambda: self.live,
            "driver_allocated_memory": lambda: self.reserved,
            "recommended_max_memory": lambda: self.total,
            "set_per_process_memory_fraction": self.limits.append,
        }
        for name, answer in (metal if kind == "mps" else general).items():
            patch.setattr(getattr(torch, kind), name, answer, raising=False)
        patch.setattr(getattr(torch, kind), "get_rng_state", lambda *_: torch.get_rng_state())
        patch.setattr(getattr(torch, kind), "set_rng_state", lambda *_: None)
        patch.setattr(getattr(torch, kind), "empty_cache", self._release)
        patch.setattr(accelerators, "available_host_bytes", lambda: self.available)
        patch.setattr(accelerators, "_METAL", accelerators._MetalAllocator())
        patch.setattr(accelerators, "current_kind", lambda: kind)
        patch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
        # Lightning reduces numbers on the device of the strategy.
        make = torch.tensor
        patch.setattr(torch, "tensor", lambda *args, device=None, **kwargs: make(*args, **kwargs))

    def trainer_arguments(self) -> dict[str, Any]:
        return {"strategy": PlayedStrategy(self.device), "devices": 1}

    def _reset(self, device: torch.device) -> None:
        self.peak = self.live

    def _release(self) -> None:
        self.releases += 1
        self.reserved = self.live


def apple(patch: pytest.MonkeyPatch, available: int = 20 * GIB) -> PlayedDevice:
    """Play an Apple GPU of a machine with 32 GiB."""
    patch.delenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", raising=False)
    return PlayedDevice(patch, "mps", 22 * GIB, available)


def gb10(patch: pytest.MonkeyPatch) -> PlayedDevice:
    """Play a GB10 whose page cache is full: the figures of unsloth#10704."""
    played = PlayedDevice(
        patch, "cuda", int(119.6 * GIB), int(115.65 * GIB), name="NVIDIA GB10", is_integrated=1, major=12, minor=1
    )
    played.free = int(41.52 * GIB)
    return played


def gh200(patch: pytest.MonkeyPatch) -> PlayedDevice:
    """Play a GH200: memory of its own, which the kernel manages as a NUMA node."""
    address = {"pci_domain_id": 9, "pci_bus_id": 1, "pci_device_id": 0}
    return PlayedDevice(patch, "cuda", 94 * GIB, 400 * GIB, is_integrated=0, **address)


def rocm(patch: pytest.MonkeyPatch, total: int = 64 * GIB, **properties: Any) -> PlayedDevice:
    """Play a GPU of AMD, which has CUDA's names."""
    patch.setattr(torch.version, "hip", "7.2")
    return PlayedDevice(patch, "cuda", total, 50 * GIB, **properties)


def xpu(patch: pytest.MonkeyPatch, **properties: Any) -> PlayedDevice:
    """Play a GPU of Intel."""
    return PlayedDevice(patch, "xpu", 16 * GIB, 12 * GIB, **properties)


PLAY = {"Apple": apple, "GB10, Jetson": gb10, "GH200": gh200, "AMD": rocm, "Intel": xpu}
proven: dict[tuple[str, str], str] = {}


def proves(feature: str, *devices: str, outcome: str = "simulated") -> Any:
    """Note that a test proves what the table of lightning_vram/memory/device/README.md says."""
    proven.update(dict.fromkeys(((feature, device) for device in devices), outcome))
    return lambda test: test
