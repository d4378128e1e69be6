"""The largest size that fits and that the model takes, by a law through a few runs."""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightning_vram as lv
from lightning_vram.estimation import estimate_memory, traced_fit
from lightning_vram.estimation.batches import with_batch_size
from lightning_vram.estimation.estimate import Limit, SizeLaw, find_limit
from lightning_vram.estimation.traced_fit import TracedFit
from lightning_vram.memory.tracking.timeline import Allocation, Category, MemoryEvent, MemoryTimeline, Phase
from lightning_vram.private_names.dispatcher import DynamicOutputShapeException


def a_run(*changes):
    """One allocation for each change of bytes, all of them freed at the end."""
    allocations = tuple(
        Allocation(f"op{number}", "", Phase.FORWARD, Category.ACTIVATIONS, "lazy:0") for number in range(len(changes))
    )
    births = [MemoryEvent(number, change, Phase.FORWARD) for number, change in enumerate(changes)]
    deaths = [MemoryEvent(number, -change, Phase.BACKWARD) for number, change in enumerate(changes)]
    timeline = MemoryTimeline(allocations, (*births, *deaths), (), "lazy:0")
    return TracedFit(timeline, {"train": (0, len(timeline.events))})


def batch_of(size):
    return a_run(1000, 40 * size, 6 * size)


def sequence_of(length):
    return a_run(1000, 40 * length, 3 * length**2)


def peak_of(run):
    return run.timeline.peak_bytes


def test_a_step_of_another_size_is_predicted_to_the_byte():
    for make, known, sizes in ((batch_of, (8, 4), (1, 2, 7, 64)), (sequence_of, (64, 48, 32), (8, 33, 500))):
        law = SizeLaw({size: make(size) for size in known})
        assert [law.predict(size).timeline for size in sizes] == [make(size).timeline for size in sizes]


def test_nothing_follows_from_steps_that_did_other_things():
    with pytest.raises(ValueError, match="differs between the sizes 8, 4"):
        SizeLaw({8: batch_of(8), 4: a_run(1000, 160)})
    assert find_limit(lambda size: a_run(*[size] * size), peak_of, 10_000, (8, 4), batch_of(8)) == Limit()


@pytest.mark.parametrize(
    ("limit_bytes", "largest"),
    [(1000 + 46 * 20, 20), (1000 + 46 * 21 - 1, 20), (1000 + 46 * 3, 3), (1000 + 46, 1), (1045, 0)],
)
def test_the_largest_batch_is_found_and_traced(limit_bytes, largest):
    traced = []

    def trace(size):
        traced.append(size)
        return batch_of(size)

    assert find_limit(trace, peak_of, limit_bytes, (8, 4), batch_of(8)) == Limit(largest)
    assert traced == [4, *([largest] if largest else [])]


def test_a_law_that_a_trace_belies_gives_no_answer():
    def trace(size):
        return batch_of(size) if size <= 8 else a_run(1000, 40 * size, 6 * size + 5000)

    assert find_limit(trace, peak_of, 3000, (8, 4), batch_of(8)) == Limit()


def refusing(takes, error=ValueError):
    """Traces of a model that takes some sizes."""

    def trace(size):
        if not takes(size):
            raise error(f"no {size}\nof all sizes")
        return batch_of(size)

    return trace


@pytest.mark.parametrize(
    ("takes", "limit_bytes", "limit"),
    [
        (lambda size: size <= 500, 10**6, Limit(500, "ValueError: no 501")),
        (lambda size: size == 8, 10**6, Limit(8, "ValueError: no 9")),  # no law follows
        (lambda size: size == 8, 1000, Limit()),  # nobody knows which smaller one it takes
        (lambda size: size % 8 == 0, 1000 + 46 * 83, Limit(80, "ValueError: no 81")),
        (lambda size: size >= 8, 1000 + 46 * 83, Limit(83)),
        (lambda size: size > 1, 1000 + 46, Limit(0, "ValueError: no 1")),
        (lambda size: size <= 512, 1000 + 46 * 83, Limit(83)),  # memory ends first
    ],
)
def test_a_size_that_the_model_refuses_is_a_limit(takes, limit_bytes, limit):
    assert find_limit(refusing(takes), peak_of, limit_bytes, (8, 4), batch_of(8)) == limit


def test_a_value_that_fakes_do_not_know_or_a_host_without_memory_are_no_limit_of_the_model():
    def unknown(text):
        return DynamicOutputShapeException(torch.ops.aten.nonzero.default)

    assert find_limit(refusing(lambda size: size <= 8, unknown), peak_of, 10**6, (8, 4), batch_of(8)) == Limit()
    for error in (MemoryError, torch.OutOfMemoryError):
        with pytest.raises(error):
            find_limit(refusing(lambda size: size <= 8, error), peak_of, 10**6, (8, 4), batch_of(8))


TINY = lv.DeviceSpec("tiny", memory_bytes=64 * 2**20, capability=(8, 0), context_bytes=0, workspace_bytes=0)
ROWS = 40


class Sequences(pl.LightningModule):
    """Predicts tokens, whose embeddings go through what a test asks for."""

    def __init__(self, look=lambda module, ids, x: x) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(50, 16), nn.Embedding(ROWS, 16), nn.Linear(16, 50)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("places", torch.arange(ROWS)[None])
        self.look = look

    def training_step(self, batch, batch_idx):
        ids, mask = batch
        x = self.look(self, ids * mask, self.tokens(ids))
        return self.head(x).flatten(0, 1).logsumexp(1).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_range(module, ids, x):
    return x + module.positions(torch.arange(ids.shape[1], device=ids.device))


def by_slice(module, ids, x):
    return x + module.positions.weight[: ids.shape[1]]


def by_tokens(module, ids, x):  # as RoBERTa: padding has no place of its own
    return x + module.positions(ids.ne(0).cumsum(1) - 1)


def by_assertion(module, ids, x):
    assert ids.shape[1] <= ROWS, f"at most {ROWS}"
    return x


def by_windows(module, ids, x):
    return x.unflatten(1, (-1, 8)).flatten(1, 2)


def by_distance(module, ids, x):  # as BERT's relative_key
    places = torch.arange(ids.shape[1], device=ids.device)
    return x + module.positions((places[:, None] - places).abs()).sum(1)


def a_batch(size=4, length=24):
    return torch.full((size, length), 7), torch.ones(size, length, dtype=torch.int64)


ROOMY = replace(TINY, memory_bytes=2**44)
OUT_OF_BOUNDS = "IndexError: index 40 is out of bounds for dimension 0 with size 40"


@pytest.mark.slow_except("slice")
@pytest.mark.parametrize(
    ("look", "device", "reason"),
    [
        pytest.param(by_range, TINY, OUT_OF_BOUNDS, id="range"),
        pytest.param(by_slice, TINY, "RuntimeError: ", id="slice"),
        pytest.param(by_assertion, TINY, "AssertionError: at most 40", id="assertion"),
        pytest.param(by_tokens, ROOMY, OUT_OF_BOUNDS, id="tokens"),
        pytest.param(by_distance, ROOMY, "IndexError: ", id="distance"),
    ],
)
def test_the_longest_sequence_ends_where_the_model_does(look, device, reason):
    estimate = estimate_memory(Sequences(look), a_batch(), device=device)
    assert estimate.max_sequence_length == ROWS
    assert estimate.sequence_length_refusal.startswith(reason)
    assert "\n" not in estimate.sequence_length_refusal
    assert f"The model raises with a longer sequence: {estimate.sequence_length_refusal}." in estimate.notes
    assert estimate.max_batch_size > 4
    assert estimate.batch_size_refusal == ""


@pytest.mark.slow
def test_the_longest_sequence_of_windows_is_a_multiple_of_them():
    estimate = estimate_memory(Sequences(by_windows), a_batch(), device=TINY)
    plain = estimate_memory(Sequences(), a_batch(), device=TINY)
    assert plain.sequence_length_refusal == ""
    assert estimate.max_sequence_length % 8 == 0
    assert plain.max_sequence_length - 16 <= estimate.max_sequence_length <= plain.max_sequence_length


def test_a_batch_made_for_its_shapes_has_no_values_that_count():
    ids, mask = a_batch()
    estimate = estimate_memory(Sequences(by_assertion), (ids * 1000, mask), device=TINY)
    assert estimate.max_sequence_length == ROWS


def test_the_largest_batch_ends_where_the_model_does():
    def four(module, ids, x):
        if len(x) != 4:
            raise ValueError("four")
        return x

    estimate = estimate_memory(Sequences(four), a_batch(), device=TINY)
    assert (estimate.max_batch_size, estimate.batch_size_refusal) == (4, "ValueError: four")


def normed(module, ids, x):
    return x + module.norm(x.mean(1))[:, None]


@pytest.mark.slow
def test_where_a_norm_takes_no_single_sample_the_law_is_made_of_larger_batches():
    estimate = estimate_memory(Sequences(normed), a_batch(2), device=TINY)
    assert estimate.max_batch_size > 100
    trainer, full = {"callbacks": [lv.MicroBatching("auto")]}, replace(TINY, memory_bytes=2**10)
    assert not estimate_memory(Sequences(normed), a_batch(), device=full, trainer=trainer, find_limits=False).fits


def test_a_step_that_reads_values_and_takes_one_size_is_recorded_with_it():
    def look(module, ids, x):
        assert len(x) == 8
        return x * int((ids + x[..., 0].long()).max())

    estimate = estimate_memory(Sequences(look), a_batch(8), device="cpu")
    assert any("a real step on the CPU with 8 samples" in note for note in estimate.notes)
    assert estimate.max_batch_size is None


def test_what_the_model_raises_at_the_given_size_is_its_own():
    with pytest.raises(IndexError):
        estimate_memory(Sequences(by_range), a_batch(length=ROWS + 1), device=TINY)


def test_a_mistake_of_ours_is_no_limit_of_the_model(monkeypatch):
    def breaking(*arguments):
        monkeypatch.setattr(traced_fit, "FreshBatches", None)
        return with_batch_size(*arguments)

    monkeypatch.setattr("lightning_vram.estimation.estimate.with_batch_size", breaking)
    with pytest.raises(TypeError, match="not callable"):
        estimate_memory(Sequences(), a_batch(), device=TINY)
