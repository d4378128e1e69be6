"""Batches in parts: how they are cut, how much each part counts, and which sizes fit, halved and tried again."""

import json

import pytest
import torch
from torch import nn

from lightning_vram.callbacks.micro_batching.runner import shares_of
from lightning_vram.core.batches.splitting import BatchSplitError, SplitArgumentError
from lightning_vram.techniques.micro_batching import (
    BatchCutter,
    BatchFacts,
    MicroBatchSizes,
    NormCounting,
    find_time_first,
)


class Graph:
    """A batch no rule knows."""

    def __init__(self, nodes: list[int]) -> None:
        self.nodes = nodes


def split_graph(batch: Graph, size: int) -> list[Graph]:
    return [Graph(batch.nodes[start : start + size]) for start in range(0, len(batch.nodes), size)]


@pytest.mark.parametrize(("size", "sizes"), [(3, [3, 2, 2]), (5, [4, 3]), (7, [7]), (99, [7]), (1, [1] * 7)])
def test_parts_are_as_few_and_as_equal_as_can_be(size, sizes):
    batch = {"x": torch.arange(14.0).reshape(7, 2), "y": torch.arange(7)}
    cutter = BatchCutter()
    facts = cutter.measure(batch)
    assert (facts.num_samples, facts.num_elements) == (7, 21)
    assert facts.elements_of(3) == 9
    assert facts.elements_of(99) == 21
    parts = cutter.cut(batch, facts, size)
    assert [count for _, count in parts] == sizes
    assert torch.equal(torch.cat([part["x"] for part, _ in parts]), batch["x"])


def test_the_users_function_knows_what_no_rule_does():
    cutter, batch = BatchCutter(split=split_graph), Graph([5, 6, 7])
    facts = cutter.measure(batch)
    assert facts.num_samples == 3
    assert [(part.nodes, count) for part, count in cutter.cut(batch, facts, 2)] == [([5, 6], 2), ([7], 1)]


def test_who_can_run_it_whole_gets_it_as_one_sample_in_containers_of_its_own():
    cutter, batch = BatchCutter(), {"graph": Graph([1]), "x": torch.zeros(4, 3), "y": torch.zeros(5)}
    facts = cutter.measure_or_keep_whole(batch)
    assert (facts.num_samples, facts.num_elements) == (1, 17)
    assert facts.why_whole is not None
    assert facts.why_whole.startswith('batch["graph"] has a type that cannot be split: Graph, but')
    ((part, size),) = cutter.cut(batch, facts, 1)
    assert size == 1
    assert part is not batch
    assert all(part[key] is batch[key] for key in batch)


def test_what_the_user_said_about_a_batch_has_to_be_right():
    with pytest.raises(SplitArgumentError, match=r"^shared_keys names 'mask', which is not in the batch"):
        BatchCutter(["mask"]).measure_or_keep_whole({"x": torch.zeros(4)})
    with pytest.raises(SplitArgumentError, match=r"^split_batch\(batch, 1\) returned no micro-batch for a Graph\.$"):
        BatchCutter(split=lambda batch, size: []).measure_or_keep_whole(Graph([1]))
    cutter = BatchCutter(split=lambda batch, size: [batch])
    with pytest.raises(BatchSplitError, match=r"returned 1 micro-batches for 3 samples, expected 2: 2 samples each"):
        cutter.cut(torch.zeros(3), BatchFacts(3, 3, "3"), 2)


def test_shares_are_of_samples_or_of_what_the_weight_counts():
    parts = [torch.tensor([1, 1]), torch.tensor([0, -100]), torch.tensor([-100])]
    assert shares_of(parts, [2, 2, 1], None) == [0.4, 0.4, 0.2]
    assert shares_of(parts, [2, 2, 1], lambda part: float((part != -100).sum())) == [2 / 3, 1 / 3, 0.0]
    assert shares_of(parts, [2, 2, 1], lambda part: (part != -100).sum()) == [2 / 3, 1 / 3, 0.0]
    assert shares_of(parts, [2, 2, 1], lambda part: torch.tensor(0)) == [0.4, 0.4, 0.2]


# --- time before samples ---


def time_first_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(48.0).reshape(6, 4, 2), torch.arange(4)


@pytest.mark.parametrize("kind", [tuple, lambda pair: {"x": pair[0], "y": pair[1]}])
def test_samples_are_cut_along_their_dimension_where_a_tensor_has_it(kind):
    cutter, (x, y) = BatchCutter(batch_dim=1), time_first_batch()
    facts = cutter.measure(kind((x, y)))
    assert facts.num_samples == 4
    parts = [part.values() if isinstance(part, dict) else part for part, _ in cutter.cut(kind((x, y)), facts, 3)]
    assert all(map(torch.equal, torch.cat([x for x, _ in parts], 1), x))
    assert torch.equal(torch.cat([y for _, y in parts]), y)
    assert [tuple(x.shape) for x, _ in parts] == [(6, 2, 2), (6, 2, 2)]


def test_shared_entries_are_not_cut_along_it_and_arrays_are_refused():
    numpy = pytest.importorskip("numpy")
    x, mask = torch.arange(24).reshape(6, 4), torch.ones(6, 6)
    cutter = BatchCutter(["mask"], batch_dim=1)
    batch = {"x": x, "mask": mask}
    ((first, _), (second, _)) = cutter.cut(batch, cutter.measure(batch), 2)
    assert torch.equal(torch.cat([first["x"], second["x"]], 1), x)
    assert torch.equal(first["mask"], mask)
    with pytest.raises(BatchSplitError, match=r"^batch_dim= splits tensors only, got float64\[6, 4\]\. To split it, "):
        cutter.measure({"x": x, "y": numpy.zeros((6, 4))})


UNCLEAR = {
    "tokens": torch.zeros(6, 4, dtype=torch.long),
    "sequences": (torch.zeros(6, 4, 8), torch.zeros(6, 4, 8)),
    "one sequence": torch.zeros(6, 4, 8),
}
CLEAR = {
    "labels": (torch.zeros(6, 4, 8), torch.zeros(6)),
    "images": {"image": torch.zeros(6, 3, 4, 4), "tokens": torch.zeros(6, 5)},
    "texts": {"x": torch.zeros(6, 4, 8), "text": list("abcdef")},
}


@pytest.mark.parametrize("batch", UNCLEAR.values(), ids=UNCLEAR)
def test_a_batch_that_may_be_time_first_is_refused_where_the_module_takes_such(batch):
    cutter = BatchCutter(time_first="encoder.rnn")
    with pytest.raises(
        BatchSplitError, match=r"layer 'encoder\.rnn' has batch_first=False.*batch_dim=1.*batch_dim=0.*split="
    ):
        cutter.measure(batch)
    facts = cutter.measure_or_keep_whole(batch)
    assert facts.why_whole is not None
    assert BatchCutter().measure(batch).num_samples == 6


@pytest.mark.parametrize("batch", CLEAR.values(), ids=CLEAR)
def test_what_has_an_entry_for_each_sample_shows_where_they_are(batch):
    assert BatchCutter(time_first="encoder.rnn").measure(batch).num_samples == 6


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), "1"),
        (nn.Sequential(nn.GRU(2, 2, batch_first=True)), None),
        (nn.TransformerEncoderLayer(4, 2), "self_attn"),
        (nn.TransformerEncoderLayer(4, 2, batch_first=True), None),
    ],
)
def test_layers_that_take_time_first_are_found(module, name):
    assert find_time_first(module) == name


def test_parts_are_in_one_piece_as_batches_of_loaders_are():
    tokens = torch.arange(24).reshape(6, 4)
    cutter = BatchCutter(batch_dim=1)
    parts = [part for part, _ in cutter.cut(tokens, cutter.measure(tokens), 2)]
    assert [part.view(-1).tolist() for part in parts] == [part.flatten().tolist() for part in tokens.split(2, 1)]


@pytest.mark.parametrize("targets", [torch.zeros(4, 1), torch.zeros(4, 3)])
def test_targets_with_samples_first_are_refused_beside_inputs_with_time_first(targets):
    with pytest.raises(BatchSplitError, match=r"batch_dim"):
        BatchCutter(batch_dim=1).measure((torch.zeros(6, 4, 2), targets))


def run_in_parts(norm: nn.Module, parts: list[torch.Tensor]) -> None:
    with NormCounting(norm, sum(map(len, parts))) as counting:
        for part in parts:
            counting.begin_part(len(part), 0.0)
            norm(part)


@pytest.mark.parametrize("momentum", [0.1, 0.7])
@pytest.mark.parametrize("sizes", [[4, 4], [3, 3, 2], [8]], ids=str)
def test_equal_parts_move_the_statistics_as_the_whole_does(momentum: float, sizes: list[int]):
    """Parts with the same mean and variance: then only forgetting could differ."""
    rows = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    parts = [rows.repeat(size, 1) for size in sizes]
    whole, split = (nn.BatchNorm1d(1, momentum=momentum).double() for _ in range(2))
    for _ in range(3):
        whole(torch.cat(parts))
        run_in_parts(split, parts)
    assert torch.allclose(split.running_mean, whole.running_mean, rtol=0, atol=1e-14)
    assert split.num_batches_tracked == whole.num_batches_tracked == 3
    assert split.momentum == momentum


def test_a_cumulative_average_counts_every_part():
    norm = nn.BatchNorm1d(1, momentum=None)
    run_in_parts(norm, [torch.tensor([[0.0], [2.0]]), torch.tensor([[2.0], [4.0]])])
    assert norm.running_mean == 2.0
    assert norm.num_batches_tracked == 2


def test_a_norm_that_does_not_run_and_a_frozen_one_stay():
    frozen, idle = nn.BatchNorm1d(1).eval(), nn.BatchNorm1d(1)
    with NormCounting(nn.ModuleList([frozen, idle]), 4) as counting:
        counting.begin_part(2, 0.5)
        frozen(torch.ones(2, 1))
    assert frozen.num_batches_tracked == idle.num_batches_tracked == 0
    assert frozen.momentum == idle.momentum == 0.1


SHAPE, OTHER = "x[8]", "x[16]"


def run(sizes: MicroBatchSizes, room: int, shape: str = SHAPE, num_samples: int = 8) -> list[int]:
    """One batch on a device with room for so many samples of ten elements; the sizes that were tried."""
    tried, size = [], sizes.propose(shape, num_samples, 10 * num_samples)
    while True:
        tried.append(num_samples if size is None else size)
        if tried[-1] <= room:
            sizes.note_success(shape, size, 10 * tried[-1])
            return tried
        sizes.note_failure(shape, tried[-1], 10 * tried[-1])
        size = (tried[-1] + 1) // 2


def test_it_starts_whole_halves_and_remembers():
    sizes = MicroBatchSizes(None)
    assert run(sizes, room=2) == [8, 4, 2]
    assert [run(sizes, room=8) for _ in range(3)] == [[2]] * 3


def test_a_new_shape_starts_below_what_has_failed():
    sizes = MicroBatchSizes(None)
    run(sizes, room=4)
    assert run(sizes, room=16, shape=OTHER, num_samples=16) == [4]
    assert run(sizes, room=16, shape="x[3]", num_samples=3) == [3]
    assert run(sizes, room=4, shape="x[7]", num_samples=7) == [7, 4]


def test_after_some_batches_it_tries_more_and_waits_twice_as_long_after_each_failure():
    sizes = MicroBatchSizes(2)
    assert [run(sizes, room=4) for _ in range(8)] == [[8, 4], [4], [8, 4], [4], [4], [4], [8, 4], [4]]


def test_growing_succeeds_step_by_step():
    sizes = MicroBatchSizes(2)
    run(sizes, room=2)
    assert [run(sizes, room=8) for _ in range(5)] == [[2], [4], [4], [8], [8]]
    assert run(sizes, room=32, shape=OTHER, num_samples=16) == [8]


def test_what_was_learned_survives_a_checkpoint():
    sizes, fresh = MicroBatchSizes(2), MicroBatchSizes(2)
    run(sizes, room=2)
    fresh.load_state_dict(json.loads(json.dumps(sizes.state_dict())))
    assert run(fresh, room=2) == [2]
    assert run(fresh, room=2) == [4, 2]


def test_a_failure_elsewhere_says_nothing_of_elements():
    sizes = MicroBatchSizes(None)
    sizes.propose(SHAPE, 8, 80)
    sizes.note_failure(SHAPE, 8, None)
    assert sizes.propose(SHAPE, 8, 80) == 4
    assert sizes.propose(OTHER, 16, 160) is None
