"""The parts of the package and sensible combinations of them, each with what it must be equal to."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_vram import (
    AccumulationScheduler,
    ActivationCheckpointing,
    ActivationCompression,
    ActivationOffload,
    EarlyRelease,
    EmptyCache,
    FSDPOffloadStrategy,
    InPlaceFusion,
    LeakDetector,
    LeanMixedPrecision,
    LowBitOptimizer,
    MicroBatching,
    OptimizerInBackward,
    SavePolicy,
    SlurmRequeue,
    VRAMMonitor,
)

Options = dict[str, Any]
ROUNDING, SIXTEEN_BIT, LOSSY = 1e-4, 3e-2, 0.3
"""Largest differences, as parts of what training has changed: sums in another order, 16-bit weights, lossy codecs."""


class _OtherKernel(Callback):
    """AdamW in single operators, which round otherwise than the fused kernel: what rounding alone grows to."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group.update(fused=False, foreach=False)


@dataclass(frozen=True)
class Part:
    """One way to train.

    Args:
        name: As a user would write it.
        make: Of the device and a scratch folder: arguments of a Trainer.
        reference: Name in :data:`REFERENCES` of the run that it is compared with.
        tolerance: Largest difference, as a part of what the reference's training has changed; 0: equal to the bit.
    """

    name: str
    make: Callable[[torch.device, Path], Options]
    reference: str = "plain"
    tolerance: float = 0.0


def _mixed(precision: str, scaler: bool = False) -> Callable[[torch.device, Path], Options]:
    def make(device: torch.device, folder: Path) -> Options:
        own_scaler = torch.amp.GradScaler(device.type) if scaler else None
        return {"plugins": [MixedPrecision(precision, device.type, own_scaler)]}

    return make


REFERENCES: dict[str, Callable[[torch.device, Path], Options]] = {
    "plain": lambda device, folder: {},
    "bf16-mixed": _mixed("bf16-mixed"),
    "16-mixed": _mixed("16-mixed", scaler=True),
    "accumulation": lambda device, folder: {"accumulate_grad_batches": 2},
}


def _callbacks(
    name: str, make: Callable[[Path], list[Any]], reference: str = "plain", tolerance: float = 0.0, **options: Any
) -> Part:
    return Part(name, lambda device, folder: {"callbacks": make(folder), **options}, reference, tolerance)


def _lean(name: str, reference: str, tolerance: float = 0.0, **arguments: Any) -> Part:
    return Part(
        f"LeanMixedPrecision({name})",
        lambda device, folder: {"plugins": [LeanMixedPrecision(**arguments)]},
        reference,
        tolerance,
    )


def _sharded(
    name: str, *callbacks: Callable[[], Any], precision: str | None = None, rounding: float = ROUNDING, **arguments: Any
) -> Part:
    def make(device: torch.device, folder: Path) -> Options:
        plugins = {"plugins": [LeanMixedPrecision(precision)]} if precision is not None else {}
        cpu_threads = None if device.type == "cuda" else 1  # else the cores are those of the device
        strategy = FSDPOffloadStrategy(min_params=100, cpu_threads=cpu_threads, **arguments)
        return {"strategy": strategy, "callbacks": [callback() for callback in callbacks], **plugins}

    reference = {None: "plain", "bf16": "bf16-mixed", "fp16": "16-mixed"}[precision]
    is_exact = arguments["offload"] == "none"  # else the host's AdamW rounds otherwise than the device's
    return Part(f"fsdp_offload, {name}", make, reference, 0.0 if is_exact else SIXTEEN_BIT if precision else rounding)


def _offload(**arguments: Any) -> ActivationOffload:
    return ActivationOffload("4KiB", **arguments)


CALLBACKS = (
    Part("plain again", REFERENCES["plain"]),  # the control: whether kernels are deterministic at all
    _callbacks("EmptyCache", lambda folder: [EmptyCache(every_n_batches=1)]),
    _callbacks("VRAMMonitor", lambda folder: [VRAMMonitor(path=folder / "vram.jsonl")]),
    _callbacks("VRAMMonitor(track=True)", lambda folder: [VRAMMonitor(1, track=True, path=folder / "vram.jsonl")]),
    _callbacks("EarlyRelease", lambda folder: [EarlyRelease(collect_every_n_steps=2)]),
    _callbacks("LeakDetector", lambda folder: [LeakDetector()]),
    _callbacks("OptimizerInBackward", lambda folder: [OptimizerInBackward()]),
    _callbacks("LowBitOptimizer(bits=8)", lambda folder: [LowBitOptimizer(bits=8)], tolerance=LOSSY),
    _callbacks("SlurmRequeue", lambda folder: [SlurmRequeue(folder)]),
    _callbacks("ActivationCheckpointing", lambda folder: [ActivationCheckpointing()]),
    _callbacks("ActivationCheckpointing, every 2nd", lambda folder: [ActivationCheckpointing(every_n_layers=2)]),
    _callbacks("ActivationCheckpointing, matmuls", lambda folder: [ActivationCheckpointing(save="matmuls")]),
    _callbacks("ActivationCheckpointing, attention", lambda folder: [ActivationCheckpointing(save="attention")]),
    _callbacks(
        "ActivationCheckpointing, every 2nd matmul",
        lambda folder: [ActivationCheckpointing(save=SavePolicy("matmuls", 2))],
    ),
    _callbacks("ActivationOffload", lambda folder: [_offload()]),
    _callbacks("ActivationOffload, no window", lambda folder: [_offload(window_bytes=0)]),
    _callbacks("ActivationOffload, not pinned", lambda folder: [_offload(pin_memory=False)]),
    _callbacks("ActivationOffload, disk", lambda folder: [_offload(disk_path=folder)]),
    _callbacks("ActivationOffload, bf16", lambda folder: [_offload(compress="bf16")], tolerance=SIXTEEN_BIT),
    _callbacks("ActivationCompression", lambda folder: [ActivationCompression()]),
    *(
        _callbacks(
            f"ActivationCompression, {name}",
            lambda folder, name=name: [ActivationCompression(lossy=name)],
            tolerance=LOSSY,
        )
        for name in ("bf16", "fp8", "int8")
    ),
    _callbacks("InPlaceFusion", lambda folder: [InPlaceFusion()]),
    _callbacks("InPlaceFusion, inplace", lambda folder: [InPlaceFusion(inplace=True)]),
    _callbacks("InPlaceFusion, replay", lambda folder: [InPlaceFusion(dropout="replay")]),
    _callbacks("MicroBatching, fits", lambda folder: [MicroBatching()]),
    _callbacks("MicroBatching(2)", lambda folder: [MicroBatching(2)], tolerance=1.0),  # other dropout masks
    _callbacks("AccumulationScheduler", lambda folder: [AccumulationScheduler({0: 2})], "accumulation"),
)
COMBINATIONS = (
    _callbacks("Checkpointing, Offload", lambda folder: [ActivationCheckpointing(), _offload()]),
    _callbacks("Checkpointing matmuls, Offload", lambda folder: [ActivationCheckpointing(save="matmuls"), _offload()]),
    _callbacks("Checkpointing, Fusion", lambda folder: [ActivationCheckpointing(every_n_layers=2), InPlaceFusion()]),
    _callbacks("Fusion, Offload", lambda folder: [InPlaceFusion(), _offload()]),
    _callbacks("Compression, Offload", lambda folder: [ActivationCompression(), _offload()]),
    _callbacks("Fusion, Compression", lambda folder: [InPlaceFusion(), ActivationCompression()]),
    _callbacks("Checkpointing, MicroBatching", lambda folder: [ActivationCheckpointing(), MicroBatching()]),
    _callbacks(
        "Checkpointing, Offload, Fusion, EmptyCache, VRAMMonitor",
        lambda folder: [
            ActivationCheckpointing(every_n_layers=2),
            _offload(),
            InPlaceFusion(),
            EmptyCache(every_n_batches=1),
            VRAMMonitor(path=None),
        ],
    ),
)
PRECISIONS = (
    _lean("bf16", "bf16-mixed", precision="bf16"),
    _lean("bf16, recast", "bf16-mixed", precision="bf16", recast_in_backward=True),
    _lean("bf16, norms", "bf16-mixed", SIXTEEN_BIT, precision="bf16", low_precision_norms=True),
    _lean("fp16", "16-mixed", precision="fp16"),
    _lean("fp16, recast", "16-mixed", precision="fp16", recast_in_backward=True),
    Part(
        "LeanMixedPrecision, Checkpointing, Offload",
        lambda device, folder: {
            "plugins": [LeanMixedPrecision("bf16", recast_in_backward=True)],
            "callbacks": [ActivationCheckpointing(), _offload(), EmptyCache(), VRAMMonitor(path=None)],
        },
        "bf16-mixed",
    ),
)
PARAMETERS = tuple(
    _lean(f"bf16, {name}", "bf16-mixed", tolerance, precision="bf16", parameters=name)
    for name, tolerance in (
        *(("bf16+master", SIXTEEN_BIT), ("bf16+split", SIXTEEN_BIT), ("bf16+kahan", SIXTEEN_BIT)),
        ("bf16+stochastic", LOSSY),
    )
)
"""Without dropout: CUDA's kernel draws another mask for 16-bit activations than for float32."""
STRATEGIES = (
    _callbacks("AdamW(foreach=False), the control of rounding", lambda folder: [_OtherKernel()], tolerance=1.0),
    _sharded("none", offload="none"),
    _sharded("params", offload="params"),
    _sharded("optimizer", offload="optimizer"),
    _sharded("none, bf16", offload="none", precision="bf16"),
    _sharded("params, bf16", offload="params", precision="bf16"),
    _sharded("optimizer, bf16", offload="optimizer", precision="bf16"),
    _sharded("params, fp16", offload="params", precision="fp16"),
    _sharded("grad_op", offload="params", shard="grad_op"),
    _sharded(
        "params, bf16, Checkpointing, Offload", ActivationCheckpointing, _offload, offload="params", precision="bf16"
    ),
    _sharded("optimizer, Fusion", InPlaceFusion, offload="optimizer"),
)

IMAGES = (
    Part("plain again", REFERENCES["plain"]),
    _callbacks("AdamW(foreach=False), the control of rounding", lambda folder: [_OtherKernel()], tolerance=1.0),
    _callbacks("ActivationCheckpointing", lambda folder: [ActivationCheckpointing(every_n_layers=2)]),
    _callbacks("ActivationOffload", lambda folder: [_offload()]),
    _callbacks("ActivationCompression", lambda folder: [ActivationCompression()]),
    _callbacks("InPlaceFusion", lambda folder: [InPlaceFusion()]),
    _callbacks("InPlaceFusion, inplace", lambda folder: [InPlaceFusion(inplace=True)]),
    _callbacks("Fusion, Offload", lambda folder: [InPlaceFusion(), _offload()]),
    _lean("bf16", "bf16-mixed", precision="bf16", recast_in_backward=True),
    _sharded("params", offload="params", rounding=1e-3),  # an H100: 2.6e-4, and 3.5e-4 for the control
)


def initialize(module: nn.Module) -> None:
    """Give norms random weights: at 1 and 0 what is merely close looks exact."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.normal_(part.weight, 1.0, 0.3)
            nn.init.normal_(part.bias, 0.0, 0.3)
