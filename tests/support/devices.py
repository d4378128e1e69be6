"""The accelerator that tests marked ``device`` run on: ``pytest --device sim``, or ``cuda``."""

from types import ModuleType
from typing import TypeVar

import torch

T = TypeVar("T")
_found = torch.accelerator.current_accelerator()
DEVICE = "cuda" if _found is None else _found.type  # without --device these tests are collected, and not run
ACCELERATOR = {"cuda": "gpu"}.get(DEVICE, DEVICE)  # Lightning's name


def device_module() -> ModuleType:
    """Return ``torch.cuda``, or what it is for this device."""
    return torch.get_device_module(DEVICE)


def allow_bytes(num_bytes: int) -> None:
    """Let this process have no more of the device; the test's end lifts it."""
    module = device_module()
    module.set_per_process_memory_fraction(num_bytes / module.get_device_properties(0).total_memory)


def allocate_workspaces() -> None:
    """Let cuBLAS allocate what it keeps, up to 32 MiB for each thread that multiplies: this one, and the backward's.

    Called before bytes are counted, so that a test counts the same ones alone and after others.
    """
    ones = torch.ones(64, 64, device=DEVICE, requires_grad=True)
    (ones @ ones).sum().backward()


def at_size(real: T, simulated: T) -> T:
    """Return what is large enough for a GPU to show it, or small enough for a CPU that plays one."""
    return simulated if DEVICE == "sim" else real
