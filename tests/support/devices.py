"""The accelerator that tests marked ``device`` run on: ``pytest --device sim``, or ``cuda``."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TypeVar

import torch

T = TypeVar("T")
_found = torch.accelerator.current_accelerator()
DEVICE = "cuda" if _found is None else _found.type  # without --device these tests are collected, and not run
ACCELERATOR = {"cuda": "gpu"}.get(DEVICE, DEVICE)  # Lightning's name


def device_module() -> ModuleType:
    return torch.get_device_module(DEVICE)


def requested_bytes() -> int:
    """Return the bytes that were asked of the allocator, and are in use.

    Allocated bytes count whole blocks. CUDA splits nothing off a block for more than 1 MiB that would be left with
    1 MiB or less, so each such block may be up to 1 MiB larger than what it is for, depending on what ran before.
    """
    return int(device_module().memory_stats()["requested_bytes.all.current"])


@contextmanager
def refuse_waits() -> Iterator[None]:
    """Let what makes the host wait for the device raise an error here."""
    module = device_module()
    try:
        with warnings.catch_warnings():
            # CUDA's first use says so, which would be an error after the mode is set already
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
            module.set_sync_debug_mode("error")
        yield
    finally:
        module.set_sync_debug_mode("default")


def allocate_workspaces() -> None:
    """Let cuBLAS allocate what it keeps, up to 32 MiB for each thread that multiplies: this one, and the backward's.

    Called before bytes are counted, so that a test counts the same ones alone and after others. Lightning's
    accelerator for CUDA frees them at the start of a run, after the hook ``setup``, and at its end.
    """
    ones = torch.ones(64, 64, device=DEVICE, requires_grad=True)
    (ones @ ones).sum().backward()


def free_workspaces() -> None:
    """Free what cuBLAS keeps, as Lightning does, for bytes that are counted before the first product of a run."""
    if DEVICE == "cuda":
        torch._C._cuda_clearCublasWorkspaces()


def at_size(real: T, simulated: T) -> T:
    """Return what is large enough for a GPU to show it, or small enough for a CPU that plays one."""
    return simulated if DEVICE == "sim" else real
