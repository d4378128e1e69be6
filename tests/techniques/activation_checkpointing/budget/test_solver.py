"""Plans are compared with all plans there are; the memory of a plan is played through call by call."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest

from lightning_vram.techniques.activation_checkpointing.budget_plan import (
    BudgetError,
    CallProfile,
    Decisions,
    OperatorProfile,
    StepProfile,
    predict_peak,
    solve,
)

MIB = 2**20
SHARES = (0.9, 0.75, 0.5, 0.3, 0.1)


def layer_calls(profile: StepProfile, name: str) -> list[CallProfile]:
    return [call for call in profile.calls if call.layer == name]


def step(calls: Iterable[CallProfile], base_total_bytes: int = 0) -> StepProfile:
    return StepProfile(tuple(calls), base_total_bytes)


def options_of(calls: list[CallProfile]) -> Iterator[frozenset[int] | None]:
    ordinals = range(max(len(call.operators) for call in calls))
    yield None
    for size in range(len(ordinals) + 1):
        yield from map(frozenset, combinations(ordinals, size))


def simulate(profile: StepProfile, decisions: Decisions) -> int:
    """Run the round event by event: what a call keeps is held until its backward ends."""
    calls = [(call, decisions[call.layer]) for call in profile.calls]
    held = [
        call.saved_bytes if kept is None else sum(call.operators[o].num_bytes for o in kept) for call, kept in calls
    ]
    peak = profile.base_total_bytes + sum(held)
    for call, kept in reversed(calls):
        held.pop()
        unsaved = sum(call.operators[o].num_bytes for o in kept or () if not call.operators[o].is_saved)
        peak = max(peak, call.base_live_bytes + sum(held) + call.saved_bytes + unsaved)
    return peak


def all_plans(profile: StepProfile) -> Iterator[Decisions]:
    """All plans that differ in their effect."""
    options = []
    for name in profile.decide(None):
        calls = layer_calls(profile, name)
        effects = {tuple(call.effect(decision) for call in calls): decision for decision in options_of(calls)}
        options.append([(name, decision) for decision in effects.values()])
    return map(dict, product(*options))


def best_by_brute_force(profile: StepProfile, budget_bytes: int) -> float:
    """Least cost of all plans that fit."""
    return min(profile.recompute_cost(plan) for plan in all_plans(profile) if simulate(profile, plan) <= budget_bytes)


def excess(profile: StepProfile, budget_bytes: int) -> float:
    """What a plan recomputes more than the best one, as a share of the forward; it keeps its promises."""
    plan = solve(profile, budget_bytes)
    assert plan.peak_bytes == simulate(profile, plan.decisions) <= budget_bytes
    assert plan.minimum_bytes == peak_of(profile, frozenset())
    assert plan.plain_peak_bytes == peak_of(profile, None)
    assert plan.recompute_share * profile.cost == pytest.approx(profile.recompute_cost(plan.decisions))
    return plan.recompute_share - best_by_brute_force(profile, budget_bytes) / (profile.cost or 1.0)


def draw_call(rng: random.Random, position: int, base_live_bytes: int, num_operators: int) -> CallProfile:
    top = rng.choice([3, 10, 1000])  # small numbers give ties, large ones near misses
    operators = tuple(
        OperatorProfile(f"aten.op{i}", rng.randint(0, top), rng.random() < 0.6, float(rng.randint(0, top)))
        for i in range(num_operators)
    )
    saved_bytes = sum(o.num_bytes for o in operators if o.is_saved) + rng.randint(0, top)
    cost = sum(o.cost for o in operators) + rng.randint(0, top)
    return CallProfile(f"net.{position}", base_live_bytes, saved_bytes, cost, operators)


def draw_base(rng: random.Random, num_calls: int) -> list[int]:
    """Rising (inputs of layers), flat, or up and down as in a U-Net."""
    kind, size = rng.randrange(3), rng.choice([0, 5, 300])
    if kind == 0:
        return [size * i for i in range(num_calls)]
    if kind == 1:
        return [size] * num_calls
    return [size * min(i, num_calls - i) for i in range(num_calls)]


def draw_step(seed: int, num_layers: int, max_operators: int) -> StepProfile:
    rng = random.Random(seed)
    base = draw_base(rng, num_layers)
    calls = [draw_call(rng, i, base[i], rng.randint(0, max_operators)) for i in range(num_layers)]
    if rng.random() < 0.3:  # equal layers, each with its own base
        calls = [replace(calls[0], layer=f"net.{i}", base_live_bytes=base[i]) for i in range(num_layers)]
    return step(calls, max(base) + rng.choice([0, 10, 500]))


def peak_of(profile: StepProfile, decision: frozenset[int] | None) -> int:
    return simulate(profile, profile.decide(decision))


def budgets(profile: StepProfile) -> list[int]:
    minimum, plain = peak_of(profile, frozenset()), peak_of(profile, None)
    return [minimum, *(minimum + int((plain - minimum) * share) for share in SHARES), plain]


@pytest.mark.parametrize(
    ("num_layers", "max_operators"),
    [pytest.param(1, 5, id="one"), pytest.param(2, 4, id="two"), pytest.param(4, 2, id="four")],
)
def test_the_plan_is_as_cheap_as_any(num_layers: int, max_operators: int) -> None:
    """Of all plans there are; in small models with operators of any size the mean counts."""
    excesses = []
    for seed in range(5):
        profile = draw_step(seed, num_layers, max_operators)
        excesses += [excess(profile, budget_bytes) for budget_bytes in budgets(profile)]

    assert sum(excesses) / len(excesses) < 0.005


def draw_repeated(seed: int) -> StepProfile:
    """Layers that are called several times in a row, alike or not."""
    rng = random.Random(seed)
    calls: list[CallProfile] = []
    base_live_bytes = 0
    for i in range(3):
        first = draw_call(rng, i, base_live_bytes, 2)
        is_alike = rng.random() < 0.5
        for _ in range(rng.randint(1, 3)):
            call = first if is_alike else draw_call(rng, i, base_live_bytes, 2)
            calls.append(replace(call, base_live_bytes=base_live_bytes))
            base_live_bytes += rng.choice([0, 7])
    return step(calls, base_live_bytes + 3)


def draw_turns(seed: int) -> StepProfile:
    """Two views through the same layers, as in contrastive training."""
    profile = draw_step(seed, 3, 2)
    return step([*profile.calls, *profile.calls], profile.base_total_bytes)


@pytest.mark.parametrize("draw", [draw_repeated, draw_turns])
def test_calls_of_a_layer_share_a_decision_and_the_plan_is_as_cheap_as_any(draw) -> None:
    profiles = [draw(seed) for seed in range(5)]

    excesses = [excess(profile, budget_bytes) for profile in profiles for budget_bytes in budgets(profile)]

    assert sum(excesses) / len(excesses) < 0.01


def transformer(num_layers: int, unit_bytes: int = MIB) -> StepProfile:
    """Equal layers: query, key, value, attention, output (not saved), up (four times as wide), down (not saved)."""
    operators = (
        *(OperatorProfile("aten.mm", unit_bytes, True, 1.0) for _ in range(3)),
        OperatorProfile("aten.attention", unit_bytes + unit_bytes // 16, True, 2.0),
        OperatorProfile("aten.addmm", unit_bytes, False, 1.0),
        OperatorProfile("aten.addmm", 4 * unit_bytes, True, 4.0),
        OperatorProfile("aten.addmm", unit_bytes, False, 4.0),
    )
    calls = [
        CallProfile(f"net.blocks.{i}", unit_bytes * (i + 1), 16 * unit_bytes, 16.0, operators)
        for i in range(num_layers)
    ]
    return step(calls, unit_bytes * (num_layers + 4))


def test_a_deep_transformer_uses_its_budget() -> None:
    profile = transformer(100)
    budget_bytes = peak_of(profile, None) // 2

    plan = solve(profile, budget_bytes)

    assert 0.99 * budget_bytes < plan.peak_bytes <= budget_bytes


def test_a_single_step_by_hand() -> None:
    """Two layers of 10 saved bytes, 3 of them a product's, which is 6 of the layer's cost of 8; 1 input byte each.

    Both plain need 2 + 20 at the end of the forward. Within 21, one is recomputed but for its product, which costs 2.
    If that is the second, its backward needs 2 + 10 + 10; if it is the first, the second's needs 2 + 3 + 10.
    """
    product = OperatorProfile("aten.mm", 3, True, 6.0)
    profile = step([CallProfile(name, i + 1, 10, 8.0, (product,)) for i, name in enumerate("ab")], 2)

    plan = solve(profile, 21)

    assert plan.decisions == {"a": frozenset({0}), "b": None}
    assert (plan.peak_bytes, plan.plain_peak_bytes, plan.minimum_bytes) == (15, 22, 12)
    assert plan.recompute_share == 2.0 / 16.0


def test_a_step_without_layers_is_its_base() -> None:
    plan = solve(step([], 7), 7)

    assert (plan.decisions, plan.peak_bytes, plan.recompute_share) == ({}, 7, 0.0)


def test_a_budget_below_the_minimum_says_the_minimum_and_where() -> None:
    profile = transformer(4)

    with pytest.raises(BudgetError) as caught:
        solve(profile, 20 * MIB - 1)

    assert str(caught.value) == (
        "budget=20.00 MiB is below the minimum of 20.00 MiB, which is reached in the backward of 'net.blocks.3' with "
        "every layer checkpointed. Give at least budget='20.00MiB', a smaller batch, or smaller layers."
    )
    assert caught.value.minimum_bytes == 20 * MIB
    assert solve(profile, 20 * MIB).peak_bytes == 20 * MIB


def test_a_minimum_at_the_end_of_the_forward_is_named_so() -> None:
    with pytest.raises(BudgetError, match=r"which is reached at the end of the forward with every layer checkpointed"):
        solve(step([CallProfile("a", 0, 1, 1.0)], 100), 99)


def draw_offloadable(seed: int) -> StepProfile:
    """Of all bytes a part cannot travel; calls need some of the base bytes again."""
    rng = random.Random(seed)
    drawn = draw_step(seed, 3, 2)
    calls = [replace(c, input_bytes=c.base_live_bytes // rng.choice([3, 4])) for c in drawn.calls]
    staying_bytes = drawn.base_total_bytes // 8 + sum(call.saved_bytes for call in calls) // 8
    return replace(step(calls, drawn.base_total_bytes), staying_bytes=staying_bytes, largest_bytes=rng.choice([0, 3]))


def test_with_offloading_plans_fit_and_recompute_less() -> None:
    num_offloaded = 0
    for seed in range(6):
        profile = draw_offloadable(seed)
        offload_bytes = peak_of(profile, None) // random.Random(seed).choice([1, 2, 4])
        for budget_bytes in budgets(profile):
            plan = solve(profile, budget_bytes, offload_bytes)

            away = plan.offloaded_bytes
            assert plan.peak_bytes == predict_peak(profile, plan.decisions, away) <= budget_bytes
            assert away <= offload_bytes
            if away:
                num_offloaded += 1
                assert plan.recompute_share < solve(profile, budget_bytes).recompute_share
                assert away == 1 or predict_peak(profile, plan.decisions, away - 1) > budget_bytes
    assert num_offloaded > 5


def test_what_the_bus_carries_is_not_recomputed() -> None:
    profile = replace(transformer(12), largest_bytes=4 * MIB)
    budget_bytes = peak_of(profile, None) // 2

    plans = [solve(profile, budget_bytes, num_bytes * MIB) for num_bytes in (0, 40, 80, 400)]

    costs = [plan.recompute_share for plan in plans]
    assert costs[0] > costs[1] > costs[2] > costs[3] == 0
    assert 0 < plans[3].offloaded_bytes < 150 * MIB
    assert plans[3].peak_bytes <= budget_bytes
    assert "\noffloaded       " in plans[3].table
