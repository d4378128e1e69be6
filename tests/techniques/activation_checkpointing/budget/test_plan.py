"""What decisions mean in bytes and cost, and how a plan is written."""

import pytest

from lightning_vram.techniques.activation_checkpointing.budget_plan import (
    CallProfile,
    CheckpointPlan,
    OperatorProfile,
    StepProfile,
    format_table,
    solve,
)

MIB = 2**20
PRODUCT = OperatorProfile("aten.mm", 3 * MIB, True, 6.0)
OUTPUT = OperatorProfile("aten.addmm", 2 * MIB, False, 1.0)


def call(layer: str = "net", base_live_bytes: int = MIB, cost: float = 8.0, operators=(PRODUCT, OUTPUT)) -> CallProfile:
    return CallProfile(layer, base_live_bytes, 10 * MIB, cost, operators)


def table_for(profile: StepProfile, decisions: list[frozenset[int] | None], **fields) -> str:
    decided = dict(zip(profile.decide(None), decisions, strict=True))
    share = profile.recompute_cost(decided) / profile.cost
    amounts = {"peak_bytes": 38 * MIB, "plain_peak_bytes": 60 * MIB, "minimum_bytes": 9 * MIB, "recompute_share": share}
    return format_table(profile, CheckpointPlan(decided, **{**amounts, **fields}), 40 * MIB)


def blocks(num_layers: int) -> StepProfile:
    calls = [call(f"net.blocks.{i}", i * MIB) for i in range(num_layers)]
    return StepProfile(tuple(calls), num_layers * MIB, other_cost=8.0)


@pytest.mark.parametrize(
    ("kept", "kept_bytes", "working_bytes", "recompute_cost"),
    [
        pytest.param(None, 10, 10, 0.0, id="plain"),
        pytest.param(frozenset(), 0, 10, 8.0, id="nothing kept"),
        pytest.param(frozenset({0}), 3, 10, 2.0, id="an output that is saved anyway"),
        pytest.param(frozenset({1}), 2, 12, 7.0, id="one that is not"),
        pytest.param(frozenset({0, 1, 5}), 5, 12, 1.0, id="an ordinal the call does not have"),
    ],
)
def test_a_decision_has_its_bytes_and_its_cost(kept, kept_bytes, working_bytes, recompute_cost) -> None:
    assert call().effect(kept) == (kept_bytes * MIB, working_bytes * MIB, recompute_cost)


def test_what_runs_again_is_counted_over_all_calls_of_a_layer_and_without_a_decision_in_full() -> None:
    profile = StepProfile((call("a"), call("a", operators=(PRODUCT,)), call("b"), call("c")), 0, other_cost=8.0)

    assert profile.recompute_cost({"a": frozenset({0, 1}), "b": None}) == 1.0 + 2.0 + 8.0
    assert profile.cost == 5 * 8.0


def test_the_table_merges_equal_neighbours() -> None:
    table = table_for(blocks(5), [frozenset(), frozenset(), frozenset({0, 1}), None, None])

    assert table.splitlines() == [
        "layers                  saved for backward    each layer  recomputed",
        "--------------------------------------------------------------------",
        "net.blocks.0 ... 1 (2)  inputs only                           100.0%",
        "net.blocks.2            outputs of addmm, mm    5.00 MiB       12.5%",
        "net.blocks.3 ... 4 (2)  all activations        10.00 MiB     nothing",
        "--------------------------------------------------------------------",
        "budget          40.00 MiB",
        "predicted peak  38.00 MiB (95.0% of the budget)",
        "baseline peak   60.00 MiB",
        "minimum         9.00 MiB",
        "extra compute   35.4% of the forward",
    ]


def test_the_table_says_what_is_offloaded() -> None:
    assert "\noffloaded       3.00 MiB of each forward\n" in table_for(blocks(1), [None], offloaded_bytes=3 * MIB)


def test_a_budget_that_changes_nothing_is_one_sentence() -> None:
    assert solve(blocks(4), 100 * MIB).table == (
        "All activations, 44.00 MiB, are within the budget of 100.00 MiB: nothing is recomputed."
    )
