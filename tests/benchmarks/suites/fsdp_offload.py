"""Memory and speed of ``fsdp_offload`` on one GPU beside others; a toy on a CPU.

ByteGPT in the shape of GPT-2 XL and with 3 billion parameters, bf16-mixed, activation checkpointing on for all, AdamW's
fused kernel wherever it can be chosen. Each run is a process of its own, and variants take turns: one that runs out of
memory is a row as well. Others' ways come with ``--peers``.
Tokens per second are over all timed steps together; the GPU is waited for at their two ends only.

``--profile`` tells where time goes: how long kernels computed, how long copies ran, how much of that beside kernels,
and what is exposed: the wall time less what the plain run computes for.
"""

import importlib
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from lightning_vram import ActivationCheckpointing, LeanMixedPrecision
from lightning_vram.core.processes import leave_group
from lightning_vram.demos import Block, ByteGPT
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import (
    NUM_WARM_UP,
    Row,
    compare_seconds,
    error_row,
    in_turns,
    measure_apart,
    read_device_events,
    sum_up_events,
)
from tests.benchmarks.peers.installed import WhyNot, needs
from tests.benchmarks.whole_runs import Same, Steps, trainer_options

SETTINGS: dict[str, Any] = {"repeats": 3, "steps": 10, "profile": False}
QUICK: dict[str, Any] = {"repeats": 1, "steps": 2}


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


_anywhere = needs(devices=())


@dataclass(frozen=True)
class Variant:
    """How it is trained.

    Args:
        make_strategy: For ``Trainer``.
        make_optimizer: Of the parameters.
        is_checkpointed: By our callback; Lightning's own wraps the blocks by itself.
        is_sharded_by_hand: In ``configure_model``.
        why_not: As :class:`~tests.benchmarks.ways.Way` has it.
        by: Whose it is.
    """

    make_strategy: Callable[[Shape], Any]
    make_optimizer: Callable[[Iterable[Tensor]], Any] = lambda parameters: torch.optim.AdamW(parameters, fused=True)
    is_checkpointed: bool = True
    is_sharded_by_hand: bool = False
    why_not: WhyNot = _anywhere
    by: str = "ours"


def _offload(mode: Any, **arguments: Any) -> Variant:
    return Variant(lambda shape: FSDPOffloadStrategy(offload=mode, min_params=shape.min_params, **arguments))


def _lightning(shape: Shape) -> FSDPStrategy:
    return FSDPStrategy(cpu_offload=True, auto_wrap_policy={Block}, activation_checkpointing_policy={Block})


class _ModelParallel(ModelParallelStrategy):
    """With weights on the host: Lightning's own then takes them to the device again, which FSDP2 refuses."""

    def model_to_device(self) -> None:
        pass


def _model_parallel(shape: Shape) -> ModelParallelStrategy:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return _ModelParallel(1, 1, process_group_backend=torch.distributed.get_default_backend_for_device(device))


def _torchao(parameters: Iterable[Tensor]) -> Any:
    kind = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return kind(list(parameters), torch.optim.AdamW, offload_gradients=True, fused=True)


VARIANTS: dict[str, Variant] = {
    "plain": Variant(lambda shape: "auto", by="plain"),
    "fsdp_offload, params": _offload("params"),
    "fsdp_offload, optimizer": _offload("optimizer"),
    "fsdp_offload, optimizer, grad_op": _offload("optimizer", shard="grad_op"),
    "fsdp_offload, none": _offload("none"),
    "Lightning FSDP, cpu_offload": Variant(_lightning, is_checkpointed=False, why_not=needs(), by="Lightning"),
    "Lightning ModelParallel, CPUOffloadPolicy": Variant(
        _model_parallel, is_checkpointed=False, is_sharded_by_hand=True, by="Lightning"
    ),
    "torchao CPUOffloadOptimizer": Variant(
        lambda shape: "auto", _torchao, why_not=needs("torchao.optim", "torchao"), by="torchao"
    ),
}


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
        return DataLoader(Same(self.batch, 1000), batch_size=None)


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


class Meter(Steps):
    """Time and peaks of all steps after the first; where the time goes, if it is profiled."""

    def __init__(self, num_steps: int, *, is_profiled: bool = False) -> None:
        super().__init__(num_steps)
        self._profiler = torch.profiler.profile(acc_events=True) if is_profiled else None

    def start(self) -> None:
        if self._profiler is not None:
            self._profiler.start()

    def stop(self) -> Row:
        row: Row = {"host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if self._profiler is not None:
            self._profiler.stop()
            sums = sum_up_events(read_device_events(self._profiler))
            row |= {name: value / self.num_steps for name, value in sums.items()}
        return row


def measure_row(
    shape: Shape, name: str, num_steps: int, *, is_profiled: bool = False, device: torch.device | None = None
) -> Row:
    """Train in this process."""
    variant = VARIANTS[name]
    meter = Meter(num_steps, is_profiled=is_profiled)
    device = device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        **trainer_options(device),
        strategy=variant.make_strategy(shape),
        gradient_clip_val=shape.clip,
        max_steps=NUM_WARM_UP + num_steps,
        callbacks=[meter, *([ActivationCheckpointing()] if variant.is_checkpointed else [])],
        **({"plugins": [LeanMixedPrecision("bf16")]} if variant.is_checkpointed else {"precision": "bf16-mixed"}),
    )
    with device:  # random numbers for billions of weights take minutes on the host
        model = (ShardedGPT if variant.is_sharded_by_hand else LitGPT)(shape, name)
    try:
        trainer.fit(model)
    except torch.OutOfMemoryError as error:
        return error_row(error)
    seconds = meter.row.pop("wall_seconds_per_step")
    all_seconds = meter.row.pop("seconds")
    row = {"seconds_per_step": seconds, "tokens_per_second": shape.num_tokens / seconds, **meter.row}
    return {**row, "all_seconds_per_step": all_seconds}


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each shape and variant; on a CPU a toy, in this process."""
    names = [name for name in VARIANTS if name == "plain" or options.ways in name]
    names = [name for name in names if options.has_peers or VARIANTS[name].by in ("plain", "ours")]
    how: dict[str, Any] = {"num_steps": options["steps"], "is_profiled": options["profile"]}
    if options.device.type == "cpu" or options.is_quick:
        yield from measure_tiny(names, repeats=options["repeats"], device=options.device, **how)
        return
    for shape in (shape for shape in SHAPES if options.only in shape):
        run = partial(measure_apart, partial(measure_row, SHAPES[shape], **how))
        yield from _measure_shape(shape, names, run, options["repeats"], options.device)


def measure_tiny(
    names: Sequence[str],
    num_steps: int,
    *,
    repeats: int = 1,
    is_profiled: bool = False,
    device: torch.device | None = None,
) -> list[Row]:
    """All variants as a toy; what cannot run is a row that says so."""
    device = device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    def run(name: str) -> Row:
        row = measure_row(TINY, name, num_steps, is_profiled=is_profiled, device=device)
        leave_group()
        return row

    return _measure_shape("tiny", names, run, repeats, device)


def _measure_shape(
    shape: str, names: Sequence[str], run: Callable[[str], Row], repeats: int, device: torch.device
) -> list[Row]:
    """Run variants in turn, several times."""
    why_not = {name: why for name in names if (why := VARIANTS[name].why_not(device)) is not None}
    turns = in_turns({name: partial(run, name) for name in names if name not in why_not}, repeats)
    rows = {name: sum_up(turns[name]) if name in turns else {"error": why_not[name]} for name in names}
    return compare([_label(shape, name, row) for name, row in rows.items()])


def sum_up(turns: Sequence[Row]) -> Row:
    """Return the medians of all turns, and the highest peaks; where one failed, its error."""
    failed = [row for row in turns if "error" in row]
    if failed:
        return failed[0]
    figures = [name for name, figure in turns[0].items() if isinstance(figure, (int, float))]
    row: Row = {
        name: (max if name.endswith("_bytes") else median)(turn[name] for turn in turns)
        for name in figures
        if all(name in turn for turn in turns)
    }
    row["all_seconds_of_turns"] = [turn["seconds_per_step"] for turn in turns]
    return {**row, "all_seconds_per_step": [turn["all_seconds_per_step"] for turn in turns]}


def _label(shape: str, name: str, row: Row) -> Row:
    return {"workload": f"ByteGPT, {shape}", "variant": name, "by": VARIANTS[name].by, **row}


def compare(rows: list[Row]) -> list[Row]:
    """Rows of one shape, with their ratios to the plain run and to Lightning's."""
    by_name = {row["variant"]: row for row in rows}
    for name, other in (("plain", "plain"), ("lightning", "Lightning FSDP, cpu_offload")):
        speed = by_name.get(other, {}).get("tokens_per_second")
        for row in rows:
            if speed and "tokens_per_second" in row:
                row[f"speed_of_{name}"] = row["tokens_per_second"] / speed
    plain = by_name.get("plain", {})
    for row in (row for row in rows if "seconds_per_step" in row):
        if "seconds_per_step" in plain:
            row |= compare_seconds(row["all_seconds_of_turns"], plain["all_seconds_of_turns"])
        if "computing_seconds" in plain:
            row["exposed_seconds"] = row["seconds_per_step"] - plain["computing_seconds"]
    return rows
