"""What libraries and the driver use in addition to tensors: the CUDA context, and cuBLAS's workspaces.

The context lies outside of the caching allocator, the workspaces inside. Figures of ``lightning-vram calibrate`` come
first. Not counted: NCCL's buffers, and cuDNN's workspaces, from nothing to gigabytes (pytorch#49207).
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from lightning_vram.memory.device import accelerators
from lightning_vram.memory.estimate.device_spec import DeviceSpec, describe_this_device
from lightning_vram.memory.units import GIB, KIB, MIB, format_bytes

# Used by a process, less what its allocator had reserved, for each multiprocessor: from PyTorch's out-of-memory
# messages of cards that were at work, so kernels that were loaded count. tests/memory/estimate has the messages.
_CONTEXT_PER_MULTIPROCESSOR = 3.4 * MIB
_CONTEXT_PER_LARGE_MULTIPROCESSOR = 4.7 * MIB  # of 2048 threads: V100, A100, H100, B200
_UNKNOWN_CONTEXT = 500 * MIB

# aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize and parseCUDABlasLtWorkspaceSize
_CUBLAS_BYTES = 8_519_680  # ":4096:2:16:8" (pytorch#95668)
_CUBLAS_BYTES_FROM_HOPPER_ON = 32 * MIB  # Blackwell: pytorch#175344
_CUBLASLT_BYTES = 1 * MIB  # for products with bias: those of the forward
_PRODUCTS = ("aten.mm.default", "aten.bmm.default", "aten.baddbmm.default", "aten.addmv.default", "aten.mv.default")
_PRODUCT_WITH_BIAS = "aten.addmm.default"  # by cuBLASLt

_HEADER = "include/ATen/cuda/CUDAContextLight.h"  # in every wheel, with CUDA or without


@dataclass(frozen=True)
class Workspaces:
    """Memory used in addition to tensors."""

    context_bytes: int  # by the driver, outside of the allocator
    # from the allocator for good, by the operator that takes it first: one block for each library, once in the forward
    # and once in the backward, and again on other streams
    persistent_bytes: Mapping[str, tuple[int, ...]]
    scratch_bytes: Mapping[str, int]  # from the allocator while an operator runs, by its name
    notes: tuple[str, ...]  # for the user


def workspaces_of(spec: DeviceSpec, environment: Mapping[str, str] = os.environ) -> Workspaces:
    """Return what PyTorch, in this version and environment, takes on a card."""
    notes = []
    context_bytes = spec.context_bytes
    if context_bytes is None:
        context_bytes = _UNKNOWN_CONTEXT
        if spec.num_multiprocessors is not None and spec.capability is not None:
            has_large = spec.capability[0] in (7, 8, 9, 10) and spec.capability[1] in (0, 3)
            each = _CONTEXT_PER_LARGE_MULTIPROCESSOR if has_large else _CONTEXT_PER_MULTIPROCESSOR
            context_bytes = int(spec.num_multiprocessors * each)
        notes.append("The CUDA context is a rule of thumb, within 30 %: `lightning-vram calibrate` measures it.")
    cublas_bytes = spec.workspace_bytes
    if cublas_bytes is None and spec.capability is not None:
        cublas_bytes = _CUBLAS_BYTES_FROM_HOPPER_ON if spec.capability >= (9, 0) else _CUBLAS_BYTES
        # pairs of KiB and how many of them
        if pairs := re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", "")):
            cublas_bytes = sum(int(size) * int(number) for size, number in pairs) * KIB
    elif cublas_bytes is None:
        notes.append(f"Workspaces of {spec.name} are not known, and not counted.")
    is_kept = spec.is_workspace_kept
    if is_kept is None:
        is_kept = environment.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1" or not _allocates_for_each_product()
    taken: dict[str, tuple[int, ...]] = {}
    if cublas_bytes:
        taken = {**dict.fromkeys(_PRODUCTS, (cublas_bytes,)), _PRODUCT_WITH_BIAS: (cublas_bytes, _CUBLASLT_BYTES)}
    scratch = {} if is_kept else {name: sizes[-1] for name, sizes in taken.items()}
    return Workspaces(context_bytes, taken if is_kept else {}, scratch, tuple(notes))


@cache
def _allocates_for_each_product() -> bool:
    """Whether this version of PyTorch takes workspaces for the time of a product (pytorch#194311), by its headers."""
    header = Path(torch.__file__).parent / _HEADER
    return header.is_file() and "CUDABlasHandleWithWorkspace" in header.read_text()


_NO_APPLE = (
    "calibrate does not support Apple GPUs: MPS counts no peaks. Estimate without it: device=DeviceSpec('Apple GPU', "
    "memory_bytes, shares_host_memory=True)."
)
_FIRST_SIZE = 256  # of a product, whose result is smaller than any workspace
_SIZE = 8192  # of products that are timed
_COPY_BYTES = 256 * MIB
_SECONDS = 0.2  # for each figure
_WITH_TF32 = (8, 0)
_MOST_CONTEXT = 2 * GIB
_FORMATS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def calibrate(on_progress: Callable[[str, float], None] = lambda stage, done: None) -> DeviceSpec:
    """Measure the accelerator of this machine, in some seconds and 1 GiB; call it before anything was multiplied.

    A ``RuntimeError`` if there is no accelerator, if it is an Apple GPU, or if other processes use it: their memory
    looks like the driver's own.
    """
    spec = describe_this_device()
    device = torch.device(accelerators.current_kind(), torch.accelerator.current_device_index())
    if not accelerators.counts_peaks(device):
        raise RuntimeError(_NO_APPLE)
    on_progress("measuring the cuBLAS workspace", 0.0)
    workspace_bytes, is_kept = _measure_workspace(device)
    on_progress("measuring memory bandwidth", 0.1)
    memory_bytes_per_s = _measure_memory(device)
    on_progress("measuring host-device transfers", 0.3)
    bus_bytes_per_s = None if spec.shares_host_memory else measure_bus(device)
    on_progress("measuring matmul throughput", 0.5)
    spec = replace(
        spec,
        memory_source="measured",
        workspace_bytes=workspace_bytes,
        is_workspace_kept=is_kept,
        bandwidth_bytes_per_s=memory_bytes_per_s,
        bus_bytes_per_s=bus_bytes_per_s,
        flops_per_s={**spec.flops_per_s, **_measure_products(device, spec)},
    )
    if spec.shares_host_memory:  # whatever the host does not have free looks like the driver's own
        return spec
    on_progress("measuring the CUDA context", 0.9)
    return replace(spec, context_bytes=_measure_context(device))  # last: kernels that are loaded by now count


def _measure_workspace(device: torch.device) -> tuple[int | None, bool | None]:
    """Return what the first product takes in addition to its result, and whether it keeps that; ``None``: unknown."""
    one = torch.ones(_FIRST_SIZE, _FIRST_SIZE, device=device)
    before_bytes = accelerators.read_allocator(device).allocated_bytes
    watch = accelerators.PeakWatch(device)
    watch.restart()
    result = one @ one
    torch.accelerator.synchronize()
    after = watch.read()
    kept_bytes = after.allocated_bytes - before_bytes - result.nbytes
    if kept_bytes > 0:
        return kept_bytes, True
    scratch_bytes = after.peak_allocated_bytes - before_bytes - result.nbytes
    return (scratch_bytes, False) if scratch_bytes > 0 else (None, None)


def _measure_memory(device: torch.device) -> float:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _fastest(lambda: target.copy_(source))  # read and written


def measure_bus(device: torch.device) -> float:
    """Return the rate of copies from and to pinned memory: the slower one."""
    on_host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    return min(
        _COPY_BYTES / _fastest(lambda: on_device.copy_(on_host, non_blocking=True)),
        _COPY_BYTES / _fastest(lambda: on_host.copy_(on_device, non_blocking=True)),
    )


def _measure_products(device: torch.device, spec: DeviceSpec) -> dict[str, float]:
    rates = {}
    for name, dtype in _FORMATS.items():
        if name == "tf32" and (spec.capability is None or spec.capability < _WITH_TF32):
            continue
        if name == "bf16" and not accelerators.has_native_bf16(device.type):
            continue
        one = torch.randn(_SIZE, _SIZE, device=device, dtype=dtype)
        other, result = one.t().contiguous(), torch.empty_like(one)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        try:
            rates[name] = 2 * _SIZE**3 / _fastest(partial(torch.mm, one, other, out=result))
        finally:
            torch.set_float32_matmul_precision(before)
    return rates


def _measure_context(device: torch.device) -> int:
    accelerators.empty_cache(device)
    free_bytes, total_bytes = torch.get_device_module(device).mem_get_info(device)
    context_bytes = int(total_bytes - free_bytes - accelerators.read_allocator(device).reserved_bytes)
    if context_bytes > _MOST_CONTEXT:
        raise RuntimeError(
            f"{format_bytes(context_bytes)} of GPU memory are used outside of this process's tensors, more than a "
            "driver needs. Calibrate while no other process uses the GPU."
        )
    return max(context_bytes, 0)


def _fastest(run: Callable[[], Tensor]) -> float:
    """Return seconds of a run; the timer waits for the device, and warms up."""
    return min(Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=_SECONDS).times)
