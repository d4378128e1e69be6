"""Steps that read values: one real step records what they read, and steps on fake tensors are answered from it."""

import copy
import random
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from support.any_modules import MODULES, WIDTH, Plain, rows
from torch import Tensor, nn

from lightning_vram import ActivationCheckpointing, MicroBatching
from lightning_vram.estimation import estimate_memory
from lightning_vram.estimation.batches import with_batch_size
from lightning_vram.estimation.traced_fit import FitRun, trace_fit, trace_real_fit
from lightning_vram.memory.estimate.known_values import Read, RecordedReads, recorded

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SIZE = 32


class Reading(Plain):
    """Asks for a number of its data."""

    def __init__(self, ask: Any = lambda outputs: int(outputs.argmax())) -> None:
        super().__init__()
        self.ask = ask

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        outputs = self.net(batch)
        self.ask(outputs)
        return outputs.square().mean()


class Masked(Plain):
    """Keeps half of the rows, whichever they are."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch[batch[:, 0] > 0]).square().mean()


def masked_rows(size: int) -> Tensor:
    batch = rows(size)
    batch[::2, 0], batch[1::2, 0] = 1.0, -1.0
    return batch


def note_of(estimate: Any) -> str:
    (note,) = (note for note in estimate.notes if "reads values" in note)
    return note


def check(module: pl.LightningModule, batch: Tensor, trainer: dict[str, Any] | None = None, samples: int = SIZE) -> Any:
    """Hold an estimate against real steps."""
    before = copy.deepcopy(module.state_dict())
    estimate = estimate_memory(module, batch, device="cpu", trainer=trainer, find_limits=False)
    assert note_of(estimate).endswith(f"Those of a real step on the CPU with {samples} samples are used.")
    assert "(test_recorded_reads.py:" in note_of(estimate)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    real = trace_real_fit(module, batch, FitRun(trainer or {}))
    for stage in real.spans:
        assert estimate.stages[stage].timeline.peak_bytes == real.stage(stage).peak_bytes
    return estimate


ASKS = {
    "integer": lambda x: int(x.argmax()),
    "truth": lambda x: bool(x.mean() > 0),
    "number": lambda x: x.sum().item(),
    "list": lambda x: x.tolist(),
    "array": lambda x: x.detach().numpy(),
    "array by protocol": lambda x: np.asarray(x.detach()),
    "text": lambda x: f"{x.sum():.2f}",
    "range": lambda x: x[: int((x[:, 0] > 0).sum())].exp().sum(),
    "unique": lambda x: x.unique(return_inverse=True, return_counts=True),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0)[1],
    "masked select": lambda x: x.masked_select(x > 0),
    "repeat": lambda x: x.repeat_interleave(x[:, 0].abs().long(), dim=0),
    "equality": lambda x: torch.equal(x, x.clone()),
    "closeness": lambda x: torch.allclose(x, x.clone()),
    "distribution": lambda x: torch.distributions.Normal(x, x.exp(), validate_args=True).rsample(),
    "one hot": lambda x: nn.functional.one_hot(x.argmax(1)),
}


@pytest.mark.quick_sample(6)
@pytest.mark.parametrize("name", ASKS)
def test_what_a_step_may_read(name):
    check(Reading(ASKS[name]), rows(SIZE))


def test_on_a_card_no_other_batch_is_tried():
    estimate = estimate_memory(Masked(), masked_rows(SIZE), device="rtx4090")
    assert estimate.timeline.device == "lazy:0"
    assert (estimate.max_batch_size, estimate.max_sequence_length) == (None, None)
    assert any(note.startswith("No other batch is tried: the step ran on the CPU") for note in estimate.notes)


@pytest.mark.slow
def test_recomputation_and_parts_of_a_batch_read_the_same():
    torch.manual_seed(0)
    module, run = BlocksThatRead(), FitRun({})
    baseline = trace_fit(module, rows(SIZE), run).stage("train").peak_bytes
    for feature in (ActivationCheckpointing(), MicroBatching(8)):
        trainer = {"callbacks": [feature]}
        traced = trace_fit(module, rows(SIZE), replace(run, trainer_arguments=trainer)).stage("train").peak_bytes
        real = trace_real_fit(module, rows(SIZE), FitRun(trainer)).stage("train").peak_bytes
        assert abs(traced - real) <= 0.03 * real  # parts select other shares
        assert traced < baseline


class Block(nn.Module):
    """Adds to the largest outputs, and more than once if they are large."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        if bool(y.abs().max() > 0.5):
            y = y + self.net(y)
        return x.index_add(0, torch.where(y[:, 0] > 0)[0], y[y[:, 0] > 0])


class BlocksThatRead(Plain):
    """Layers that can be checkpointed, each of which reads its own values."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(4)))


def test_a_batch_twice_as_large_selects_twice_as_much():
    run = FitRun({})
    small, large = masked_rows(SIZE), torch.cat([masked_rows(SIZE)] * 2)
    trace_fit(Masked(), small, run)
    peak_bytes = trace_fit(Masked(), with_batch_size(small, SIZE, 2 * SIZE), run).stage("train").peak_bytes
    assert peak_bytes == trace_real_fit(Masked(), large, FitRun({})).stage("train").peak_bytes


@pytest.mark.parametrize(
    ("shape", "old", "new", "expected"),
    [
        ((6, 2), [(4, 5)], [(4, 5)], (6, 2)),  # places of a mask
        ((6, 2), [(4, 5)], [(8, 5)], (12, 2)),
        ((6, 2), [(4, 5)], [(4, 10)], (12, 2)),
        ((4, 7, 9), [(4, 7)], [(8, 7)], (8, 7, 9)),  # of each sample
        ((4, 7, 9), [(4, 7)], [(4, 14)], (4, 14, 9)),
        ((3,), [(4,), (3,)], [(8,), (3,)], (3,)),
    ],
)
def test_sizes_grow_with_what_is_read(shape, old, new, expected):
    assert Read(("what", None, 0), tuple(old), None).scaled(shape, new) == expected


GENERATOR = torch.Generator()
TYPES = None, torch.float16


class Drawing(Plain):
    """Draws from all generators of random numbers, and refuses few samples after that."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scale = random.random() + np.random.random() + torch.rand(1, generator=GENERATOR)
        outputs = self.net(nn.functional.dropout(batch)) * scale
        chosen = outputs.mean(1).topk(16).indices
        return outputs[chosen][outputs[chosen] > 0].mean()


def test_random_numbers_are_those_of_a_run_that_nobody_has_estimated():
    states = [random.getstate, np.random.get_state, torch.get_rng_state, GENERATOR.get_state]
    module, batch = Drawing(), rows(SIZE)
    before = [read() for read in states]
    assert note_of(estimate_memory(module, batch, device="cpu", find_limits=False))
    for read, state in zip(states, before, strict=True):
        assert str(read()) == str(state) if not isinstance(state, Tensor) else torch.equal(read(), state)


def test_tensors_on_two_devices_are_a_mistake_though_the_host_has_one():
    with pytest.raises(RuntimeError, match="device"):
        estimate_memory(Reading(lambda x: x + torch.randn(x.shape)), rows(4), device="rtx4090")


def test_two_masks_are_two_reads():
    def choose(x: Tensor) -> None:
        for few in (x[:4], x[:8], x[:16]):
            mask = few[:, 0] > few[:, 1]
            (few @ few.mT)[mask][:, mask].sum().backward(retain_graph=True)
            _ = (few @ few.mT)[mask, mask]

    check(Reading(choose), rows(SIZE))


def test_a_number_that_only_lightning_shows_needs_no_real_step():
    class Shown(Plain):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.net(batch).square().mean()
            self.log("loss", loss, prog_bar=True)
            return loss

    run = FitRun({})
    assert trace_fit(Shown(), rows(4), run).notes == ()
    assert not run.reads.is_recorded


def test_several_processes_read_what_one_reads():
    estimate = estimate_memory(Reading(), rows(SIZE), device="rtx4090", devices=2, find_limits=False)
    assert note_of(estimate)
    assert estimate.world_size == 2


def test_weights_without_values():
    module = Reading().to("meta")
    with pytest.raises(ValueError, match=r"reads values of tensors \(.*\. Pass a module"):
        estimate_memory(module, rows(4), device="rtx4090")


def test_a_host_that_is_too_small(monkeypatch):
    monkeypatch.setattr("lightning_vram.estimation.traced_fit.available_host_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"needs about .* of host memory; 1000 B is available"):
        estimate_memory(Reading(), rows(4), device="rtx4090")


def test_a_batch_without_values_gets_some():
    batch = torch.empty(SIZE, WIDTH, device="meta")
    assert note_of(estimate_memory(Masked(), batch, device="rtx4090", find_limits=False))


def test_tensors_made_of_tensors_have_their_values_and_types():
    def ask(_: Tensor) -> None:
        made.extend(torch.tensor([torch.as_tensor(one), 2.5], dtype=dtype) for one in (1, 1.5, True) for dtype in TYPES)

    made: list[Tensor] = []
    with recorded(RecordedReads()):
        ask(torch.ones(1))
    values, made[:] = made[:], []
    ask(torch.ones(1))
    for one, other in zip(values, made, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    trace_fit(Reading(ask), rows(4), FitRun({}))
    assert {(one.dtype, one.shape) for one in made} == {(one.dtype, one.shape) for one in values}


@pytest.mark.parametrize("name", ["nested tensors", "sparse"])
def test_what_cannot_be_traced_is_run_on_the_host(name):
    module, batch = Reading(lambda x: torch.nested.nested_tensor([x, x[:3]])), rows(SIZE)
    if name in MODULES:
        make, make_batch, _ = MODULES[name]
        module, batch = make(), make_batch(8)
    estimate = estimate_memory(module, batch, device="rtx4090")
    (note,) = (note for note in estimate.notes if "cannot be traced" in note)
    assert note.endswith("It was run on the CPU, with the whole batch.")
    assert estimate.max_batch_size is None
    assert estimate.timeline.device == "lazy:0"
    assert estimate.timeline.peak_bytes == trace_real_fit(module, batch, FitRun({})).stage("train").peak_bytes


def test_a_mistake_of_the_step_is_its_own():
    class Wrong(Plain):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return nn.functional.linear(batch, torch.ones(3, 5)).sum()

    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        estimate_memory(Wrong(), rows(4), device="rtx4090")
