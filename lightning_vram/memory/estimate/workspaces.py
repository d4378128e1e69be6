"""What libraries and the driver use in addition to tensors: the CUDA context, and cuBLAS's workspaces.

The context lies outside of the caching allocator, the workspaces inside. A card that was measured by
``lightning-vram calibrate`` overrules all of it. Not counted: what cuDNN takes inside of a convolution, and NCCL's
buffers. cuDNN chooses by heuristics of its own, from nothing to gigabytes (pytorch#49207), so no rule of thumb holds.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.units import KIB, MIB

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
    # from the allocator for good, by the name of the operator that takes it where it was not taken yet: one block for
    # each library, once for the thread of the forward and once for that of the backward, and again on other streams
    persistent_bytes: Mapping[str, tuple[int, ...]]
    scratch_bytes: Mapping[str, int]  # from the allocator while an operator runs, by its name
    notes: tuple[str, ...]  # for the user


def workspaces_of(spec: DeviceSpec, environment: Mapping[str, str] = os.environ) -> Workspaces:
    """Return what PyTorch, in this version and environment, takes on a card."""
    notes = []
    context_bytes = spec.context_bytes
    if context_bytes is None:
        context_bytes = _estimate_context(spec)
        notes.append("The CUDA context is a rule of thumb, within 30 %: `lightning-vram calibrate` measures it.")
    cublas_bytes = spec.workspace_bytes
    if cublas_bytes is None:
        cublas_bytes = _read_config(environment) if spec.capability is not None else 0
        if cublas_bytes is None:
            is_large = spec.capability is not None and spec.capability >= (9, 0)
            cublas_bytes = _CUBLAS_BYTES_FROM_HOPPER_ON if is_large else _CUBLAS_BYTES
        if spec.capability is None:
            notes.append(f"Workspaces of {spec.name} are not known, and not counted.")
    is_kept = spec.is_workspace_kept
    if is_kept is None:
        is_kept = environment.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1" or not _allocates_for_each_product()
    persistent: dict[str, tuple[int, ...]] = {}
    scratch: dict[str, int] = {}
    if is_kept and cublas_bytes:
        persistent = {**dict.fromkeys(_PRODUCTS, (cublas_bytes,)), _PRODUCT_WITH_BIAS: (cublas_bytes, _CUBLASLT_BYTES)}
    elif cublas_bytes:
        scratch = {**dict.fromkeys(_PRODUCTS, cublas_bytes), _PRODUCT_WITH_BIAS: _CUBLASLT_BYTES}
    return Workspaces(context_bytes, persistent, scratch, tuple(notes))


def _estimate_context(spec: DeviceSpec) -> int:
    if spec.num_multiprocessors is None or spec.capability is None:
        return _UNKNOWN_CONTEXT
    has_large = spec.capability[0] in (7, 8, 9, 10) and spec.capability[1] in (0, 3)
    each = _CONTEXT_PER_LARGE_MULTIPROCESSOR if has_large else _CONTEXT_PER_MULTIPROCESSOR
    return int(spec.num_multiprocessors * each)


def _read_config(environment: Mapping[str, str]) -> int | None:
    """Read ``CUBLAS_WORKSPACE_CONFIG``: pairs of KiB and how many of them; ``None`` if there are none."""
    pairs = re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * int(number) for size, number in pairs) * KIB if pairs else None


@cache
def _allocates_for_each_product() -> bool:
    """Whether this version of PyTorch takes workspaces for the time of a product (pytorch#194311), by its headers."""
    header = Path(torch.__file__).parent / _HEADER
    return header.is_file() and "CUDABlasHandleWithWorkspace" in header.read_text()
