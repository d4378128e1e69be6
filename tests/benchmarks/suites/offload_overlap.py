"""How much of an optimizer's time on the host hides behind the device's.

Through a Trainer with ``fsdp_offload``. The device is played by sleeps in the forward and the backward of each block,
twice as long in the backward. Its copies, and the little it computes, are the CPU's work here: they compete with the
step for memory. So there are two optimizers: AdamW, whose fused kernel takes less time than those copies, and AdamW in
single operators, which takes several times as long. "unrelated step" has a step of the same size on tensors that nobody
waits for: more than that no overlap can reach on the machine.

In turn, several times: the step alone, the compute phase alone, the step after the compute phase ("waiting"), and
beside it ("beside"). Figures are medians. Without clipping a step hides behind the backward, and what is left of it
behind the next forward. With clipping it begins when the backward is over, so only the next forward can hide it. With
accumulation it hides behind one micro-batch.
"""

import ctypes
import gc
import itertools
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import NUM_WARM_UP, Row, in_turns
from tests.benchmarks.whole_runs import trainer_options

SETTINGS: dict[str, Any] = {"repeats": 3, "steps": 8, "blocks": 8, "width": 2048, "threads": 0, "optimizer": ""}
QUICK: dict[str, Any] = {"repeats": 1, "steps": 2, "blocks": 2, "width": 64}


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        name: Text for the table.
        share: Length of the compute phase of a micro-batch, in steps.
        accumulate: Micro-batches for a step.
        clip: Largest norm.
    """

    name: str
    share: float
    accumulate: int = 1
    clip: float | None = None


CASES = (
    Case("no clipping, backward as long as a step", 1.5),
    Case("no clipping, forward and backward as long as a step", 1.0),
    Case("clipping, forward as long as a step", 3.0, clip=1.0),
    Case("accumulation 4, backward as long as a step", 1.5, accumulate=4),
    Case("accumulation 4 and clipping, forward as long as a step", 3.0, accumulate=4, clip=1.0),
)


class _Device(torch.autograd.Function):
    """Takes its time."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, clock: "Clock") -> Tensor:
        context.clock = clock
        time.sleep(clock.forward_seconds)
        return hidden.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        time.sleep(2 * context.clock.forward_seconds)
        return gradient, None


@dataclass
class Clock:
    """How long the forward of a block takes on the device."""

    forward_seconds: float = 0.0


class Block(nn.Module):
    def __init__(self, width: int, clock: Clock) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.clock = clock

    def forward(self, hidden: Tensor) -> Tensor:
        return _Device.apply(self.linear(hidden), self.clock)


class Idle(torch.optim.SGD):
    """Leaves parameters as they are."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return closure() if closure is not None else None


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused": partial(torch.optim.AdamW, lr=1e-4),  # what it is where it was left open
    "single operators": partial(torch.optim.AdamW, lr=1e-4, foreach=False, fused=False),
}


class LitBlocks(pl.LightningModule):
    def __init__(self, num_blocks: int, width: int, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.clock = Clock()
        self.net = nn.Sequential(*(Block(width, self.clock) for _ in range(num_blocks)))
        self.make_optimizer = optimizer
        self.width = width

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(1000, self.width), batch_size=1)


class Iterations(Callback):
    """Seconds from one step to the next."""

    def __init__(self, accumulate: int) -> None:
        self._accumulate = accumulate
        self._ends: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self._accumulate == 0:
            self._ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        ends = self._ends[NUM_WARM_UP:]
        return [end - start for start, end in itertools.pairwise(ends)]


class Waiting(Callback):
    """Has every step over before training goes on."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self._start = 0.0

    def on_before_optimizer_step(self, *args: Any) -> None:
        """That it is here keeps a step from being begun in the backward: it might change gradients."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._start:
            trainer.strategy._host_optimizers.finish()
            self.step_seconds.append(time.perf_counter() - self._start)
            self._start = 0.0


class UnrelatedSteps(Callback):
    """Steps tensors of the same sizes in another thread, one step for each step of the Trainer."""

    def __init__(self, shape: "Shape") -> None:
        self._shape = shape
        self._wanted = threading.Semaphore(0)
        self._done = threading.Semaphore(1)
        self._is_over = False

    def on_fit_start(self, trainer: pl.Trainer, module: LitBlocks) -> None:
        self._sizes = [parameter.numel() for parameter in module.parameters()]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._done.acquire()  # no more than one at a time
        self._wanted.release()

    def on_fit_end(self, *args: Any) -> None:
        self._is_over = True
        self._wanted.release()
        self._thread.join()

    def _run(self) -> None:
        torch.get_num_threads()
        torch.set_num_threads(self._shape.num_threads)
        parameters = [nn.Parameter(torch.randn(size)) for size in self._sizes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = self._shape.make_plain_optimizer(parameters)
        while self._wanted.acquire() and not self._is_over:
            optimizer.step()
            self._done.release()


@dataclass(frozen=True)
class Shape:
    """Of the model, and how long is measured."""

    num_blocks: int
    width: int
    num_threads: int
    num_steps: int
    optimizer: str = "fused"

    def make_plain_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """As it steps in ``fsdp_offload``."""
        extra = {"fused": True} if self.optimizer == "fused" else {}
        return OPTIMIZERS[self.optimizer](parameters, **extra)


def fit(shape: Shape, case: Case, forward_seconds: float, *callbacks: Callback, is_idle: bool = False) -> list[float]:
    """Return the seconds of each iteration."""
    module = LitBlocks(shape.num_blocks, shape.width, partial(Idle, lr=0.1) if is_idle else OPTIMIZERS[shape.optimizer])
    module.clock.forward_seconds = forward_seconds
    clock = Iterations(case.accumulate)
    trainer = pl.Trainer(
        **trainer_options(torch.device("cpu")),
        strategy=FSDPOffloadStrategy(wrap=[Block], cpu_threads=shape.num_threads, reshard_after_forward=False),
        max_steps=NUM_WARM_UP + shape.num_steps + 1,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        callbacks=[clock, *callbacks],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Idle is not one of|The '.*_dataloader' does not have many workers")
        trainer.fit(module)
    del trainer, module
    gc.collect()  # a trainer and its module refer to each other: the states of all fits would fill the memory
    return clock.seconds


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each optimizer and case."""
    keep_freed_memory()
    num_threads = options["threads"] or max(1, torch.get_num_threads() - 1)
    for optimizer in (name for name in OPTIMIZERS if options["optimizer"] in name):
        shape = Shape(options["blocks"], options["width"], num_threads, options["steps"], optimizer)
        for case in CASES[:1] if options.is_quick else CASES:
            if options.only in case.name:
                yield measure_case(shape, case, options["repeats"])


def measure_case(shape: Shape, case: Case, repeats: int) -> Row:
    """Choose the length of the compute phase by the step's, and time everything in turn."""
    forward_seconds = _choose_forward(shape, case)
    step_seconds: list[float] = []

    def wait() -> float:
        waiting = Waiting()
        seconds = statistics.median(fit(shape, case, forward_seconds, waiting))
        step_seconds.append(statistics.median(waiting.step_seconds[NUM_WARM_UP:]))
        return seconds

    seconds = in_turns(
        {
            "waiting": wait,
            "beside": lambda: statistics.median(fit(shape, case, forward_seconds)),
            "compute": lambda: statistics.median(fit(shape, case, forward_seconds, is_idle=True)),
            "unrelated step": lambda: statistics.median(
                fit(shape, case, forward_seconds, UnrelatedSteps(shape), is_idle=True)
            ),
        },
        repeats,
    )
    seconds["step"] = step_seconds
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    bound = max(medians["compute"], medians["step"])
    return {
        "workload": case.name,
        "variant": f"fsdp_offload, AdamW: {shape.optimizer}",
        "by": "ours",
        "seconds_per_step": medians["beside"],
        **{f"{name}_seconds": median for name, median in medians.items()},
        **{f"{name}_of_bound": medians[name] / bound for name in ("waiting", "beside", "unrelated step")},
        **{f"all_{name}_seconds": values for name, values in seconds.items()},
    }


def _choose_forward(shape: Shape, case: Case) -> float:
    """Seconds that a block sleeps in its forward: what the CPU's own part leaves of the phase."""
    waiting = Waiting()
    iteration = statistics.median(fit(shape, case, 0.0, waiting))
    step = statistics.median(waiting.step_seconds[NUM_WARM_UP:])
    own = (iteration - step) / case.accumulate
    return max(0.0, case.share * step - own) / 3 / shape.num_blocks


def keep_freed_memory() -> None:
    """Have malloc keep what is freed: on a GPU gradients come into memory that is there, here each would be new."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 2**25)
        libc.mallopt(trim_threshold, 2**31 - 1)
