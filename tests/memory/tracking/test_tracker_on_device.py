"""What the tracker counts is what the device's own allocator counts, byte for byte, under each part of the package."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.devices import ACCELERATOR, DEVICE, allocate_workspaces, device_module
from support.helpers import TinyCNN, TinyGPT
from support.offload_nets import MODES, Fused
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vram import (
    ActivationCheckpointing,
    ActivationCompression,
    ActivationOffload,
    InPlaceFusion,
    LeanMixedPrecision,
    MicroBatching,
)
from lightning_vram.core.processes import leave_group
from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

pytestmark = pytest.mark.device
NUM_WARM_UP = 2  # states of optimizers come in the first step, plans of offloading in the second

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "checkpointing, offload": lambda: {"callbacks": [ActivationCheckpointing(), ActivationOffload(1024)]},
    "matmuls": lambda: {"callbacks": [ActivationCheckpointing(save="matmuls")]},
    "bf16 on the host": lambda: {"callbacks": [ActivationOffload(1024, window_bytes=0, compress="bf16")]},
    "fusion in place": lambda: {"callbacks": [InPlaceFusion(inplace=True, dropout="replay")]},
    "int8": lambda: {"callbacks": [ActivationCompression(lossy="int8")]},
    "micro-batches": lambda: {"callbacks": [MicroBatching(2)]},
    "bf16, recast": lambda: {"plugins": [LeanMixedPrecision("bf16", recast_in_backward=True)]},
    "bf16, split": lambda: {"plugins": [LeanMixedPrecision("bf16", parameters="bf16+split")]},
    "fp16": lambda: {"plugins": [LeanMixedPrecision("fp16")]},
    **{
        f"fsdp_offload, {mode}": partial(
            lambda options: {"strategy": FSDPOffloadStrategy(**{"min_params": 100, **options})}, options
        )
        for mode, options in MODES.items()
    },
}


def requested(kind: str) -> int:
    """Bytes as they were asked for, not rounded up."""
    return device_module().memory_stats()[f"requested_bytes.all.{kind}"]


class _EndsOfOperators(TorchDispatchMode):
    """Reads the allocator after each operator: what one needs only while it runs is its kernel's own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not set(types) <= {Tensor, nn.Parameter}:
            return NotImplemented  # a DTensor comes again with what is inside
        result = func(*args, **(kwargs or {}))
        self.peak_bytes = max(self.peak_bytes, requested("current"))
        return result


class Readings(pl.Callback):
    """Reads one step with both."""

    def __init__(self) -> None:
        allocate_workspaces()
        gc.collect()
        self._before = requested("current")

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == NUM_WARM_UP:
            gc.collect()
            self._ends = _EndsOfOperators()
            self._tracker = track_memory(module, optimizers=trainer.optimizers, inputs=batch)
            self._ends.__enter__()
            self._tracker.__enter__()
            self.unnamed_bytes = requested("current") - self._before - self._timeline.live_bytes
            device_module().reset_peak_memory_stats()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == NUM_WARM_UP:
            self.peak_bytes = self._ends.peak_bytes - self._before - self.unnamed_bytes
            self.inner_peak_bytes = requested("peak") - self._before - self.unnamed_bytes
            self._tracker.__exit__(None, None, None)
            self._ends.__exit__(None, None, None)
            self.tracked = self._timeline

    @property
    def _timeline(self) -> Any:
        return self._tracker.timeline.on(f"{DEVICE}:0")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("net", [TinyCNN, partial(TinyGPT, 64)], ids=["cnn", "gpt"])
def test_peaks_are_those_of_the_allocator(net, part, make_trainer):
    torch.manual_seed(0)
    readings, options = Readings(), PARTS[part]()
    options["callbacks"] = [*options.get("callbacks", []), readings]
    model = Fused(net())
    defaults = {"accelerator": ACCELERATOR, "devices": 1, "max_epochs": 1, "limit_val_batches": 0}
    make_trainer(**defaults, **options).fit(model)
    leave_group()
    flag_bytes = 4 if part == "fp16" else 0  # of the last overflow; goes in the middle of the step
    assert readings.tracked.peak_bytes - readings.peak_bytes in (0, flag_bytes)
    assert readings.inner_peak_bytes >= readings.peak_bytes  # with the workspaces of kernels
    if DEVICE == "sim":  # cuBLAS has memory for each thread
        num_scalars = len(list(model.parameters())) + 3  # what is in the place of sharded weights; of a loss's scale
        assert readings.unnamed_bytes <= 4 * num_scalars
