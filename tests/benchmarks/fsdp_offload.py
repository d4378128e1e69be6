"""Memory and speed of ``fsdp_offload`` on one GPU beside others: python -m tests.benchmarks.fsdp_offload.

ByteGPT in the shape of GPT-2 XL and with 3 billion parameters, bf16-mixed, activation checkpointing on for all, AdamW's
fused kernel wherever it can be chosen. Each row is a process of its own: one that runs out of memory is a row as well.
Tokens per second are over all timed steps together; the GPU is waited for at their two ends only.

``--profile`` tells where time goes: how long kernels computed, how long copies ran, how much of that beside kernels,
and what is exposed: the wall time less what the plain run computes for. ``--tiny`` checks all that on a CPU.
"""

import argparse
import importlib
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from lightning_vram import ActivationCheckpointing, LeanMixedPrecision
from lightning_vram.demos import ByteGPT
from lightning_vram.demos.gpt import Block
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy
from tests.benchmarks.measure import (
    DeviceEvent,
    Row,
    accelerator_of,
    give_back,
    read_device_events,
    read_peaks,
    sum_up_events,
    synchronize,
)
from tests.benchmarks.micro_batching import Same
from tests.benchmarks.report import report

NUM_WARM_UP = 3


@dataclass(frozen=True)
class Shape:
    """Of a ByteGPT and its batch; ``clip`` is the largest norm of gradients, ``min_params`` as the strategy has it."""

    num_layers: int
    width: int
    num_heads: int
    sequence_length: int
    batch_size: int
    clip: float | None = None
    min_params: int = 1_000_000

    @property
    def num_tokens(self) -> int:
        return self.sequence_length * self.batch_size


SHAPES = {
    "GPT-2 XL, 16 k tokens": Shape(48, 1600, 25, 1024, 16),
    "GPT-2 XL, 32 k tokens": Shape(48, 1600, 25, 1024, 32),
    "GPT-2 XL, 8 k tokens, clipping": Shape(48, 1600, 25, 1024, 8, clip=1.0),
    "3 B, 16 k tokens": Shape(38, 2560, 20, 1024, 16),
    "3 B, 32 k tokens": Shape(38, 2560, 20, 1024, 32),
    "6 B, 16 k tokens": Shape(30, 4096, 32, 1024, 16),
    "8 B, 16 k tokens": Shape(40, 4096, 32, 1024, 16),
}
TINY = Shape(3, 32, 2, 16, 2, min_params=1000)


@dataclass(frozen=True)
class Variant:
    """How it is trained.

    Args:
        make_strategy: For ``Trainer``.
        make_optimizer: Of the parameters.
        is_checkpointed: By our callback; Lightning's own wraps the blocks by itself.
        is_sharded_by_hand: In ``configure_model``.
        needs_gpu: Refuses a CPU.
    """

    make_strategy: Callable[[Shape], Any]
    make_optimizer: Callable[[Iterable[Tensor]], Any] = lambda parameters: torch.optim.AdamW(parameters, fused=True)
    is_checkpointed: bool = True
    is_sharded_by_hand: bool = False
    needs_gpu: bool = False


def _offload(mode: Any, **arguments: Any) -> Variant:
    return Variant(lambda shape: FSDPOffloadStrategy(offload=mode, min_params=shape.min_params, **arguments))


def _lightning(shape: Shape) -> FSDPStrategy:
    return FSDPStrategy(cpu_offload=True, auto_wrap_policy={Block}, activation_checkpointing_policy={Block})


class _ModelParallel(ModelParallelStrategy):
    """With weights on the host: Lightning's own then takes them to the device again, which FSDP2 refuses."""

    def model_to_device(self) -> None:
        pass


def _model_parallel(shape: Shape) -> ModelParallelStrategy:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    return _ModelParallel(1, 1, process_group_backend=torch.distributed.get_default_backend_for_device(device))


def _torchao(parameters: Iterable[Tensor]) -> Any:
    kind = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return kind(list(parameters), torch.optim.AdamW, offload_gradients=True, fused=True)


VARIANTS: dict[str, Variant] = {
    "plain": Variant(lambda shape: "auto"),
    "fsdp_offload, params": _offload("params"),
    "fsdp_offload, optimizer": _offload("optimizer"),
    "fsdp_offload, optimizer, grad_op": _offload("optimizer", shard="grad_op"),
    "fsdp_offload, none": _offload("none"),
    "Lightning FSDP, cpu_offload": Variant(_lightning, is_checkpointed=False, needs_gpu=True),
    "Lightning ModelParallel, CPUOffloadPolicy": Variant(
        _model_parallel, is_checkpointed=False, is_sharded_by_hand=True
    ),
}
if importlib.util.find_spec("torchao") is not None:
    VARIANTS["torchao CPUOffloadOptimizer"] = Variant(lambda shape: "auto", _torchao, needs_gpu=True)


class LitGPT(ByteGPT):
    """Without dropout, with the variant's optimizer and one batch again and again."""

    def __init__(self, shape: Shape, variant: str) -> None:
        super().__init__(shape.num_layers, shape.width, shape.num_heads, shape.sequence_length, dropout=0.0)
        self.batch = torch.randint(256, (shape.batch_size, shape.sequence_length + 1))
        self.variant = VARIANTS[variant]

    validation_step = pl.LightningModule.validation_step

    def configure_optimizers(self) -> Any:
        return self.variant.make_optimizer(self.parameters())

    def train_dataloader(self) -> DataLoader:
        dataset = Same(self.batch)
        return DataLoader(torch.utils.data.ConcatDataset([dataset] * 100), batch_size=None)


class ShardedGPT(LitGPT):
    """As PyTorch's pages on FSDP2 shard a model, and checkpoint it."""

    def configure_model(self) -> None:
        options = {
            "mesh": self.device_mesh["data_parallel"],
            "offload_policy": CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
        }
        for index, block in enumerate(self.net.blocks):
            self.net.blocks[index] = fully_shard(checkpoint_wrapper(block), **options)
        fully_shard(self, **options)


class Meter(Callback):
    """Time and peaks of all steps after the first."""

    def __init__(self, num_steps: int, *, is_profiled: bool = False) -> None:
        self._num_steps = num_steps
        self._profiler = torch.profiler.profile(acc_events=True) if is_profiled else None
        self._start = 0.0
        self.row: Row = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        device = trainer.strategy.root_device
        if batch_idx == NUM_WARM_UP - 1:
            give_back(device)
            if self._profiler is not None:
                self._profiler.start()
            self._start = time.perf_counter()
        if batch_idx == NUM_WARM_UP + self._num_steps - 1:
            synchronize(device)
            seconds = time.perf_counter() - self._start
            self.row["seconds_per_step"] = seconds / self._num_steps
            self.row |= read_peaks(device)
            self.row["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if self._profiler is not None:
                self._profiler.stop()
                self.row |= self._sum_up(read_device_events(self._profiler))

    def _sum_up(self, events: Iterable[DeviceEvent]) -> Row:
        return {name: value / self._num_steps for name, value in sum_up_events(events).items()}


def measure_row(
    shape: Shape, name: str, num_steps: int, *, is_profiled: bool = False, device: torch.device | None = None
) -> Row:
    """Train in this process."""
    variant = VARIANTS[name]
    meter = Meter(num_steps, is_profiled=is_profiled)
    device = device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator=accelerator_of(device),
        devices=1,
        strategy=variant.make_strategy(shape),
        gradient_clip_val=shape.clip,
        max_steps=NUM_WARM_UP + num_steps,
        callbacks=[meter, *([ActivationCheckpointing()] if variant.is_checkpointed else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"plugins": [LeanMixedPrecision("bf16")]} if variant.is_checkpointed else {"precision": "bf16-mixed"}),
    )
    with device:  # random numbers for billions of weights take minutes on the host
        model = (ShardedGPT if variant.is_sharded_by_hand else LitGPT)(shape, name)
    try:
        trainer.fit(model)
    except torch.OutOfMemoryError:
        return {"fits": "out of memory"}
    return {"fits": "yes", "tokens_per_second": shape.num_tokens / meter.row["seconds_per_step"], **meter.row}


def measure_apart(shape_name: str, name: str, options: list[str]) -> Row:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "row.json")
        command = [sys.executable, "-m", "tests.benchmarks.fsdp_offload", "--shape", shape_name, "--row", name]
        result = subprocess.run([*command, *options, "-o", str(path)], capture_output=True, text=True, check=False)
        if path.exists():
            return json.loads(path.read_text())
    return {"fits": (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1][:200]}


def compare(rows: list[Row]) -> list[Row]:
    """Rows of one shape, with their ratios to the plain run and to Lightning's."""
    by_name = {row["variant"]: row for row in rows}
    for name, other in (("plain", "plain"), ("lightning", "Lightning FSDP, cpu_offload")):
        speed = by_name.get(other, {}).get("tokens_per_second")
        for row in rows:
            if speed and "tokens_per_second" in row:
                row[f"speed_of_{name}"] = row["tokens_per_second"] / speed
    computing = by_name.get("plain", {}).get("computing_seconds")
    for row in rows:
        if computing is not None and "seconds_per_step" in row:
            row["exposed_seconds"] = row["seconds_per_step"] - computing
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.fsdp_offload", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; kept under tests/benchmarks/results/")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--only", default="", help="part of a shape's name")
    parser.add_argument("--variants", default="", help="part of a variant's name; plain is always there")
    parser.add_argument("--profile", action="store_true", help="where the time goes; it takes some itself")
    parser.add_argument("--tiny", action="store_true", help="a toy, on a CPU or a GPU, in this process")
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        row = measure_row(SHAPES[arguments.shape], arguments.row, arguments.steps, is_profiled=arguments.profile)
        arguments.output.write_text(json.dumps(row))
        return
    names = [name for name in VARIANTS if name == "plain" or arguments.variants in name]
    if arguments.tiny:
        rows = measure_tiny(names, arguments.steps, is_profiled=arguments.profile)
    else:
        options = ["--steps", str(arguments.steps), *(["--profile"] if arguments.profile else [])]
        rows = []
        for shape in (shape for shape in SHAPES if arguments.only in shape):
            rows += compare(
                [{"shape": shape, "variant": name, **measure_apart(shape, name, options)} for name in names]
            )
    report("fsdp_offload", rows, arguments.output)


def measure_tiny(names: Iterable[str], num_steps: int, *, is_profiled: bool = False) -> list[Row]:
    """All variants that this machine can run, as a toy."""
    has_gpu = torch.cuda.is_available()
    rows = [
        {"shape": "tiny", "variant": name, **measure_row(TINY, name, num_steps, is_profiled=is_profiled)}
        for name in names
        if has_gpu or not VARIANTS[name].needs_gpu
    ]
    return compare(rows)


if __name__ == "__main__":
    main()
