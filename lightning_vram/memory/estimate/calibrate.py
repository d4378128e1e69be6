"""Measure the GPU of this machine, for estimates elsewhere: context, cuBLAS workspace and speed."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lightning_vram.memory.device.accelerators import current_kind, has_native_bf16
from lightning_vram.memory.device.allocator import PeakWatch, empty_cache, read_allocator
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.known_devices import describe_this_device
from lightning_vram.memory.units import GIB, MIB, format_bytes

_FIRST_SIZE = 256  # of a product, whose result is smaller than any workspace
_SIZE = 8192  # of products that are timed
_COPY_BYTES = 256 * MIB
_SECONDS = 0.2  # for each figure
_ROUNDS = 3  # of which the fastest counts
_WITH_TF32 = (8, 0)
_MOST_CONTEXT = 2 * GIB
_FORMATS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def calibrate(on_progress: Callable[[str, float], None] = lambda stage, done: None) -> DeviceSpec:
    """Measure the accelerator of this machine; call it before the process has multiplied anything.

    Takes some seconds and 1 GiB. Rates that PyTorch has no public product for (int8, fp8) stay as known. A
    ``RuntimeError`` if there is no accelerator, or other processes use it: their memory looks like the driver's own.
    """
    spec = describe_this_device()
    device = torch.device(current_kind(), torch.accelerator.current_device_index())
    on_progress("measuring the cuBLAS workspace", 0.0)
    workspace_bytes, is_kept = _measure_workspace(device)
    on_progress("measuring memory bandwidth", 0.1)
    memory_bytes_per_s = _measure_memory(device)
    on_progress("measuring host-device transfers", 0.3)
    bus_bytes_per_s = measure_bus(device)
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
    on_progress("measuring the CUDA context", 0.9)
    return replace(spec, context_bytes=_measure_context(device))  # last: kernels that are loaded by now count


def _measure_workspace(device: torch.device) -> tuple[int | None, bool | None]:
    """Return what the first product takes beside its result, and whether it keeps that; ``None``: nothing is seen."""
    one = torch.ones(_FIRST_SIZE, _FIRST_SIZE, device=device)
    before_bytes = read_allocator(device).allocated_bytes
    watch = PeakWatch(device)
    watch.restart()
    result = one @ one
    torch.accelerator.synchronize()
    after = watch.read()
    result_bytes = result.nbytes
    kept_bytes = after.allocated_bytes - before_bytes - result_bytes
    if kept_bytes > 0:
        return kept_bytes, True
    scratch_bytes = after.peak_allocated_bytes - before_bytes - result_bytes
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
        if name == "bf16" and not has_native_bf16(device.type):
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
    empty_cache(device)
    free_bytes, total_bytes = torch.get_device_module(device).mem_get_info(device)
    context_bytes = int(total_bytes - free_bytes - read_allocator(device).reserved_bytes)
    if context_bytes > _MOST_CONTEXT:
        raise RuntimeError(
            f"{format_bytes(context_bytes)} of GPU memory are used outside of this process's tensors, more than a "
            "driver needs. Calibrate while no other process uses the GPU."
        )
    return max(context_bytes, 0)


def _fastest(run: Callable[[], Tensor]) -> float:
    seconds = _time(run, 1)  # the first loads kernels
    repeats = max(1, math.ceil(_SECONDS / max(_time(run, 1), 1e-6)))
    return min(seconds, *(_time(run, repeats) for _ in range(_ROUNDS)))


def _time(run: Callable[[], Tensor], repeats: int) -> float:
    torch.accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.accelerator.synchronize()
    return (time.perf_counter() - start) / repeats
