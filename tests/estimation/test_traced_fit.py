"""Steps on fake tensors against the same steps on real ones, on the host: every byte, when and where, and for what."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_vram import (
    AccumulationScheduler,
    ActivationCheckpointing,
    ActivationCompression,
    ActivationOffload,
    ChunkedLoss,
    EarlyRelease,
    EmptyCache,
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


class TwoPlayers(pl.LightningModule):
    """Steps two optimizers by hand, one of them every second batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32))
        self.critic = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        fakes = self.generator(batch)
        loss = self.critic(fakes.detach()).square().mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        if batch_idx % 2 == 0:
            first.zero_grad()
            self.manual_backward(self.critic(fakes).mean())
            first.step()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("score", self.critic(self.generator(batch)).mean())

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.generator.parameters()), torch.optim.SGD(self.critic.parameters(), 0.1, 0.9)]


def _gpt() -> tuple[pl.LightningModule, Any]:
    return ByteGPT(2, 32, 2, 16), torch.randint(0, 255, (4, 17))


def _resnet() -> tuple[pl.LightningModule, Any]:
    return DigitsResNet(), (torch.rand(4, 1, 8, 8), torch.randint(0, 10, (4,)))


def _players() -> tuple[pl.LightningModule, Any]:
    return TwoPlayers(), torch.rand(8, 16)


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

checkpointing = ActivationCheckpointing
fusion = InPlaceFusion
compression = ActivationCompression


def offload() -> ActivationOffload:
    return ActivationOffload(min_offload_bytes=1024)


def folding() -> InPlaceFusion:
    return InPlaceFusion(fold_frozen_bn=True)


def lossy() -> ActivationCompression:
    return ActivationCompression(lossy="int8")


def matmuls() -> ActivationCheckpointing:
    return ActivationCheckpointing(save="matmuls")


def every_second() -> ActivationCheckpointing:
    return ActivationCheckpointing(every_n_layers=2)


def micro() -> MicroBatching:
    return MicroBatching(2)


def lean() -> LeanMixedPrecision:
    return LeanMixedPrecision("bf16")


def low_bits() -> LowBitOptimizer:
    return LowBitOptimizer(bits=4)


def schedule() -> AccumulationScheduler:
    return AccumulationScheduler({0: 2})


def _callbacks(*parts: Callable[[], Any], **others: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [part() for part in parts], **others}


def tiling() -> TokenTiling:
    return TokenTiling(tile=4)


_BF16 = {"precision": "bf16-mixed"}
_RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "checkpointing": _callbacks(checkpointing),
    "matmuls": _callbacks(matmuls),
    "every second layer": _callbacks(every_second),
    "fusion": _callbacks(fusion),
    "offload": _callbacks(offload),
    "compression": _callbacks(compression),
    "micro-batching": _callbacks(micro),
    "lean": lambda: {"plugins": [lean()]},
    "bf16": lambda: _BF16,
    "accumulation": lambda: {"accumulate_grad_batches": 2},
    "schedule": _callbacks(schedule),
    "empty cache": _callbacks(EmptyCache),
    "early release": _callbacks(EarlyRelease),
    "early release, accumulation": _callbacks(EarlyRelease, accumulate_grad_batches=2),
    "chunked loss": _callbacks(ChunkedLoss),
    "chunked loss, bf16, checkpointing": _callbacks(ChunkedLoss, checkpointing, **_BF16),
    "optimizer in backward": _callbacks(OptimizerInBackward),
    "optimizer in backward, low bits": _callbacks(OptimizerInBackward, low_bits),
    "chunked loss, optimizer in backward, low bits": _callbacks(ChunkedLoss, OptimizerInBackward, low_bits),
    "tiling": _callbacks(tiling),
    "tiling, bf16, checkpointing": _callbacks(tiling, checkpointing, **_BF16),
    "tiling, chunked loss, checkpointing, offload": _callbacks(tiling, ChunkedLoss, checkpointing, offload),
    "clipping": lambda: {"gradient_clip_val": 1.0},
    "clipping by value": lambda: {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
    "checkpointing, offload": _callbacks(checkpointing, offload),
    "checkpointing, bf16": _callbacks(checkpointing, **_BF16),
    "fusion, offload": _callbacks(fusion, offload),
    "fusion, compression": _callbacks(fusion, compression),
    "folding": _callbacks(folding),
    "folding, offload": _callbacks(folding, offload),
    "lossy": _callbacks(lossy),
    "fusion, lossy": _callbacks(fusion, lossy),
    "fusion, lossy, offload": _callbacks(fusion, lossy, offload),
    "fusion, bf16": _callbacks(fusion, **_BF16),
    "compression, offload": _callbacks(compression, offload),
    "micro-batching, checkpointing": _callbacks(micro, checkpointing),
    "micro-batching, offload": _callbacks(micro, offload),
    "micro-batching, accumulation": _callbacks(micro, accumulate_grad_batches=2),
    "lean, clipping": lambda: {"plugins": [lean()], "gradient_clip_val": 1.0},
    "lean, checkpointing": lambda: {"plugins": [lean()], "callbacks": [checkpointing()]},
    "matmuls, bf16, clipping": _callbacks(matmuls, **_BF16, gradient_clip_val=1.0),
    "fusion, compression, offload": _callbacks(fusion, compression, offload),
    "micro-batching, fusion, bf16": _callbacks(micro, fusion, **_BF16),
    "checkpointing, offload, lean": lambda: {"plugins": [lean()], "callbacks": [checkpointing(), offload()]},
    "schedule, compression, empty cache": _callbacks(schedule, compression, EmptyCache),
}
_OF_PLAYERS = ("plain", "bf16", "fusion", "offload", "compression", "lean", "fusion, compression, offload")
_OF_FROZEN = ("fusion", "folding", "folding, offload")
_QUICK = (
    "gpt: fusion, compression, offload",
    "gpt: chunked loss, optimizer in backward, low bits",
    "gpt: tiling, bf16, checkpointing",
    "resnet: fusion, bf16",
    "players: plain",
)
_WITHOUT = {"gpt": "folding", "resnet": ("folding", "chunked", "tiling")}  # frozen norms, a vocabulary, tokens
_ALL = [
    f"{net}: {run}"
    for net in _NETS
    for run in {"players": _OF_PLAYERS, "frozen": _OF_FROZEN}.get(net, _RUNS)
    if not run.startswith(_WITHOUT.get(net, ()))
]  # those of the others know no manual optimization


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
    return trace_real_fit(module, batch, FitRun(_RUNS[run]())), trace_fit(module, batch, FitRun(_RUNS[run]()))


def _assert_equal(case: str) -> None:
    real, fake = _both(case)
    for stage in (STEP, VALIDATION):
        expected, found = (_events(traced.stage(stage)) for traced in (real, fake))
        assert len(expected) > 0
        assert found == expected, f"{stage}: {_first_difference(expected, found)}"


def _first_difference(expected: list[Any], found: list[Any]) -> str:
    pairs = zip([*expected, None], [*found, None], strict=False)
    place, (one, other) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"event {place} is {one} on real tensors, {other} on fakes"


@pytest.mark.parametrize("case", _QUICK)
def test_a_step_on_fakes_is_that_on_real_tensors(case: str) -> None:
    _assert_equal(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in _ALL if case not in _QUICK])
def test_steps_with_all_parts_are_those_on_real_tensors(case: str) -> None:
    _assert_equal(case)


@pytest.mark.parametrize("run", ["fusion", "compression", "offload"])
def test_what_is_verified_in_the_first_step_takes_its_memory_on_fakes_too(run: str) -> None:
    real, fake = _both(f"gpt: {run}")

    assert _events(fake.stage(FIRST_STEP)) == _events(real.stage(FIRST_STEP))


def test_blocks_that_hold_offloaded_activations_are_pinned_bytes_of_the_host() -> None:
    module, batch = _gpt()

    step = trace_fit(module, batch, FitRun(_RUNS["offload"](), card=find_device("A100 80GB"))).stage(STEP)
    plain = trace_fit(module, batch, FitRun({}, card=find_device("A100 80GB"))).stage(STEP)

    assert step.pinned_peak_bytes % 2**20 == 0
    assert step.pinned_peak_bytes > 0 == plain.pinned_peak_bytes
    assert step.peak_bytes < plain.peak_bytes


def test_the_module_and_the_callbacks_are_as_before() -> None:
    module, batch = _gpt()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    callback = fusion()

    trace_fit(module, batch, FitRun({"callbacks": [callback]}))

    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert Counter(map(type, module.modules())) == Counter(map(type, _gpt()[0].modules()))


def test_what_is_over_stays_on_the_card_until_it_is_dropped() -> None:
    module, batch = _gpt()
    traced = trace_fit(module, batch, FitRun({}, find_device("h100")))
    end = max(stop for _, stop in traced.spans.values())
    made = [event.change_bytes for event in traced.timeline.events[end:] if event.change_bytes > 0]
    assert max(made, default=0) <= 8  # means of what was logged: no weight is so small, so that none was copied
