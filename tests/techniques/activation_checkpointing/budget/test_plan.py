"""What decisions mean in bytes and cost, and how a plan is written."""

import re

import pytest

from lightning_vram.techniques.activation_checkpointing.budget_plan import (
    CallProfile,
    CheckpointPlan,
    LayerProfile,
    OperatorProfile,
    StepProfile,
    format_table,
)
from lightning_vram.techniques.activation_checkpointing.budget_solver import solve

MIB = 2**20
PRODUCT = OperatorProfile("aten.mm", 3 * MIB, True, 6.0)
OUTPUT = OperatorProfile("aten.addmm", 2 * MIB, False, 1.0)


def call(position: int = 0, base_live_bytes: int = MIB, cost: float = 8.0, operators=(PRODUCT, OUTPUT)) -> CallProfile:
    return CallProfile(position, base_live_bytes, 10 * MIB, cost, operators)


def plan_for(profile: StepProfile, decisions: list[frozenset[int] | None], **fields) -> CheckpointPlan:
    choices = tuple(layer.choose(kept) for layer, kept in zip(profile.layers, decisions, strict=True))
    cost = sum(choice.recompute_cost for choice in choices)
    amounts = {"budget_bytes": 40 * MIB, "peak_bytes": 38 * MIB, "plain_peak_bytes": 60 * MIB, "minimum_bytes": 9 * MIB}
    return CheckpointPlan(profile, choices, **{**amounts, "least_recompute_cost": cost, **fields})


def blocks(num_layers: int, prefix: str = "net.blocks.") -> StepProfile:
    layers = [LayerProfile(f"{prefix}{i}", (call(i, i * MIB),)) for i in range(num_layers)]
    return StepProfile(tuple(layers), num_layers * MIB, other_cost=8.0)


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
    assert call().kept_bytes(kept) == kept_bytes * MIB
    assert call().working_bytes(kept) == working_bytes * MIB
    assert call().recompute_cost(kept) == recompute_cost


def test_a_decision_holds_for_all_calls_of_a_layer() -> None:
    layer = LayerProfile("cell", (call(0), call(1), call(2, operators=(PRODUCT,))))

    choice = layer.choose(frozenset({0, 1}))

    assert choice.kept_bytes == (5 + 5 + 3) * MIB
    assert choice.recompute_cost == 1.0 + 1.0 + 2.0
    assert choice.operators == (("aten.addmm", 2), ("aten.mm", 3))
    assert layer.choose(choice.decision) == choice
    assert layer.choose(None).decision is None


def test_what_runs_again_is_a_share_of_the_whole_forward() -> None:
    plan = plan_for(blocks(3), [frozenset(), frozenset({0}), None])

    assert plan.recompute_cost == 8.0 + 2.0
    assert plan.recompute_share == 10.0 / (3 * 8.0 + 8.0)


def test_the_table_merges_equal_neighbours() -> None:
    plan = plan_for(blocks(5), [frozenset(), frozenset(), frozenset({0, 1}), None, None])

    assert format_table(plan).splitlines() == [
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


def test_the_table_counts_operators_of_one_name() -> None:
    operators = (PRODUCT, PRODUCT, OUTPUT)
    profile = StepProfile((LayerProfile("net", (call(cost=20.0, operators=operators),)),), 0)

    assert "  outputs of addmm, 2 x mm  " in format_table(plan_for(profile, [frozenset({0, 1, 2})]))


def test_the_table_says_where_the_search_was_cut_short() -> None:
    profile = blocks(1)

    table = format_table(plan_for(profile, [frozenset()], least_recompute_cost=4.0))

    assert table.endswith("extra compute   50.0% of the forward (the best plan may need as little as 25.0%)")


def test_the_table_is_at_most_eighty_columns_wide() -> None:
    operators = tuple(
        OperatorProfile(f"some_library.an_operator_with_a_long_name_{i}", 1000 * 2**30, True, 1.0) for i in range(3)
    )
    names = [f"model.language_model.encoder.layers_of_the_network.{i}.attention.inner" for i in range(4)]
    calls = [CallProfile(i, 0, 5000 * 2**30, 5.0, operators) for i in range(4)]
    profile = StepProfile(tuple(LayerProfile(n, (c,)) for n, c in zip(names, calls, strict=True)), 0)
    decisions = [frozenset({0, 1, 2}), frozenset({0, 1, 2}), frozenset({1}), None]

    lines = format_table(plan_for(profile, decisions)).splitlines()

    assert max(map(len, lines)) <= 80
    assert lines[2].startswith("..")
    assert "(2)" in lines[2]
    assert "  3 intermediate outputs  " in lines[2]


def test_a_budget_that_changes_nothing_is_one_sentence() -> None:
    plan = solve(blocks(4), 100 * MIB)
    assert (
        format_table(plan) == "All activations, 44.00 MiB, are within the budget of 100.00 MiB: nothing is recomputed."
    )


def test_a_solved_plan_prints() -> None:
    table = format_table(solve(blocks(4), 30 * MIB))

    assert re.search(r"^budget +30\.00 MiB$", table, re.MULTILINE)
    assert "may need" not in table


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            lambda: OperatorProfile("aten.mm", -1, True, 1.0),
            "num_bytes of aten.mm must be finite and not negative, got -1.",
            id="bytes of an operator",
        ),
        pytest.param(
            lambda: OperatorProfile("aten.mm", 1, True, float("nan")),
            "cost of aten.mm must be finite and not negative, got nan.",
            id="cost of an operator",
        ),
        pytest.param(
            lambda: CallProfile(2, 0, -1, 1.0),
            "saved_bytes of the call at position 2 must be finite and not negative, got -1.",
            id="bytes of a call",
        ),
        pytest.param(
            lambda: LayerProfile("net", ()), "calls of 'net' must have rising positions, got [].", id="no call"
        ),
        pytest.param(
            lambda: LayerProfile("net", (call(1), call(0))),
            "calls of 'net' must have rising positions, got [1, 0].",
            id="calls out of order",
        ),
        pytest.param(
            lambda: StepProfile((LayerProfile("net", (call(0),)), LayerProfile("net", (call(1),))), 0),
            "names must not repeat in a step, got 'net' twice.",
            id="two layers of one name",
        ),
        pytest.param(
            lambda: StepProfile((LayerProfile("a", (call(3),)), LayerProfile("b", (call(3),))), 0),
            "positions must not repeat in a step, got 3 twice.",
            id="two calls at one position",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()
