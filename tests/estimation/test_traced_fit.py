"""Steps on fake tensors against the same steps on real ones, on the host: every byte, when and where, and for what."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.any_modules import Adversarial, rows
from torch import nn

from lightning_vram import (
    AccumulationScheduler,
    ActivationCheckpointing,
    ActivationCompression,
    ActivationOffload,
    ChunkedLoss,
    EarlyRelease,
    InPlaceFusion,
    LeanMixedPrecision,
    LowBitOptimizer,
    MicroBatching,
    OptimizerInBackward,
    TokenTiling,
)
from lightning_vram.demos import ByteGPT, DigitsResNet
from lightning_vram.estimation.traced_fit import (
    FIRST_STEP,
    STEP,
    VALIDATION,
    FitRun,
    TracedFit,
    trace_fit,
    trace_real_fit,
)
from lightning_vram.memory.estimate.device_spec import find_device
from lightning_vram.memory.tracking.timeline import MemoryTimeline

pytestmark = [
    pytest.mark.filterwarnings("ignore:ActivationOffload offloads to host memory"),
    pytest.mark.filterwarnings("ignore:AccumulationScheduler. batch norm normalizes each micro-batch"),
]

_MAKERS_OF_BATCHES = ("aten.clone.default", "aten.empty_strided.default")


def _gpt() -> tuple[pl.LightningModule, Any]:
    return ByteGPT(2, 32, 2, 16), torch.randint(0, 255, (4, 17))


def _resnet() -> tuple[pl.LightningModule, Any]:
    return DigitsResNet(), (torch.rand(4, 1, 8, 8), torch.randint(0, 10, (4,)))


def _players() -> tuple[pl.LightningModule, Any]:
    return Adversarial(), rows(8)


class LitFrozenNorms(pl.LightningModule):
    """A network whose batch norms are only evaluated."""

    def __init__(self) -> None:
        super().__init__()
        convolutions, norms = [nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3)], [nn.BatchNorm2d(16), nn.BatchNorm2d(16)]
        self.net = nn.Sequential(convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1], nn.GELU())
        for norm in norms:
            norm.eval().requires_grad_(False)

    def training_step(self, images: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(images).sum()
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)


def _frozen() -> tuple[pl.LightningModule, Any]:
    return LitFrozenNorms(), torch.rand(8, 1, 16, 16)


_NETS = {"gpt": _gpt, "resnet": _resnet, "players": _players, "frozen": _frozen}
_CALLBACKS: dict[str, Callable[[], pl.Callback]] = {
    "checkpointing": ActivationCheckpointing,
    "matmuls": lambda: ActivationCheckpointing(save="matmuls"),
    "every second layer": lambda: ActivationCheckpointing(every_n_layers=2),
    "fusion": InPlaceFusion,
    "folding": lambda: InPlaceFusion(fold_frozen_bn=True),
    "offload": lambda: ActivationOffload(min_offload_bytes=1024),
    "compression": ActivationCompression,
    "lossy": lambda: ActivationCompression(lossy="int8"),
    "micro-batching": lambda: MicroBatching(2),
    "schedule": lambda: AccumulationScheduler({0: 2}),
    "early release": EarlyRelease,
    "chunked loss": ChunkedLoss,
    "optimizer in backward": OptimizerInBackward,
    "low bits": lambda: LowBitOptimizer(bits=4),
    "tiling": lambda: TokenTiling(tile=4),
}
_ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "lean": lambda: {"plugins": [LeanMixedPrecision("bf16")]},
    "bf16": lambda: {"precision": "bf16-mixed"},
    "accumulation": lambda: {"accumulate_grad_batches": 2},
    "clipping": lambda: {"gradient_clip_val": 1.0},
    "by value": lambda: {"gradient_clip_algorithm": "value"},
}
_TOGETHER = (
    *("", "clipping, by value", "early release, accumulation", "chunked loss, bf16, checkpointing"),
    *("optimizer in backward, low bits", "chunked loss, optimizer in backward, low bits"),
    *("tiling, bf16, checkpointing", "tiling, chunked loss, checkpointing, offload", "checkpointing, offload"),
    *("fusion, bf16", "folding, offload", "fusion, lossy, offload", "micro-batching, offload"),
    *("micro-batching, accumulation", "lean, clipping", "lean, checkpointing", "matmuls, bf16, clipping"),
    *("fusion, compression, offload", "micro-batching, fusion, bf16", "checkpointing, offload, lean"),
)
_RUNS = {  # the other parts know no manual optimization
    "players": ("", "bf16", "fusion", "offload", "compression", "lean", "fusion, compression, offload"),
    "frozen": ("fusion", "folding", "folding, offload"),
}
_ALONE = [name for name in (*_CALLBACKS, *_ARGUMENTS) if name not in ("low bits", "by value")]
_WITHOUT = {"gpt": "folding", "resnet": ("folding", "chunked", "tiling")}  # frozen norms, a vocabulary, tokens
_ALL = [
    f"{net}: {run}"
    for net in _NETS
    for run in _RUNS.get(net, (*_ALONE, *_TOGETHER))
    if not run.startswith(_WITHOUT.get(net, ()))
]


def _arguments(run: str) -> dict[str, Any]:
    parts = [part for part in run.split(", ") if part]
    arguments: dict[str, Any] = {"callbacks": [_CALLBACKS[part]() for part in parts if part in _CALLBACKS]}
    for part in parts:
        arguments |= _ARGUMENTS[part]() if part in _ARGUMENTS else {}
    return arguments


def _events(timeline: MemoryTimeline) -> list[tuple[Any, ...]]:
    found = []
    for event in timeline.events:
        made = timeline.allocations[event.allocation]
        if made.op == "aten.nonzero.default":  # which tokens count, a few bytes: it asks for values
            continue
        op = "batch" if made.op in _MAKERS_OF_BATCHES else made.op
        found.append((made.device, event.change_bytes, op, made.module, made.category))
    return found


def _both(case: str) -> tuple[TracedFit, TracedFit]:
    net, _, run = case.partition(": ")
    torch.manual_seed(0)
    module, batch = _NETS[net]()
    return trace_real_fit(module, batch, FitRun(_arguments(run))), trace_fit(module, batch, FitRun(_arguments(run)))


def _first_difference(expected: list[Any], found: list[Any]) -> str:
    pairs = zip([*expected, None], [*found, None], strict=False)
    place, (one, other) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"event {place} is {one} on real tensors, {other} on fakes"


@pytest.mark.slow_except(
    "gpt: fusion, compression, offload",
    "gpt: tiling, bf16, checkpointing",
    "players: ",
)
@pytest.mark.parametrize("case", _ALL)
def test_a_step_on_fakes_is_that_on_real_tensors(case: str) -> None:
    real, fake = _both(case)
    for stage in (STEP, VALIDATION):
        expected, found = (_events(traced.stage(stage)) for traced in (real, fake))
        assert len(expected) > 0
        assert found == expected, f"{stage}: {_first_difference(expected, found)}"


@pytest.mark.slow_except("compression")
@pytest.mark.parametrize("run", ["fusion", "compression"])
def test_what_is_verified_in_the_first_step_takes_its_memory_on_fakes_too(run: str) -> None:
    real, fake = _both(f"gpt: {run}")

    assert _events(fake.stage(FIRST_STEP)) == _events(real.stage(FIRST_STEP))


@pytest.mark.slow
def test_blocks_that_hold_offloaded_activations_are_pinned_bytes_of_the_host() -> None:
    module, batch = _gpt()

    step = trace_fit(module, batch, FitRun(_arguments("offload"), card=find_device("A100 80GB"))).stage(STEP)
    plain = trace_fit(module, batch, FitRun({}, card=find_device("A100 80GB"))).stage(STEP)

    assert step.pinned_peak_bytes % 2**20 == 0
    assert step.pinned_peak_bytes > 0 == plain.pinned_peak_bytes
    assert step.peak_bytes < plain.peak_bytes


def test_what_is_over_stays_on_the_card_until_it_is_dropped() -> None:
    module, batch = _gpt()
    traced = trace_fit(module, batch, FitRun({}, find_device("h100")))
    end = max(stop for _, stop in traced.spans.values())
    made = [event.change_bytes for event in traced.timeline.events[end:] if event.change_bytes > 0]
    assert max(made, default=0) <= 8  # means of what was logged: no weight is so small, so that none was copied
