"""Plans are compared with all plans there are; the memory of a plan is played through call by call."""

import ctypes
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product

import pytest

from lightning_vram.techniques.activation_checkpointing import budget_solver
from lightning_vram.techniques.activation_checkpointing.budget_plan import (
    CallProfile,
    CheckpointPlan,
    LayerChoice,
    LayerProfile,
    OperatorProfile,
    StepProfile,
    format_table,
    predict_peak,
)
from lightning_vram.techniques.activation_checkpointing.budget_solver import BudgetError, solve

MIB = 2**20
SHARES = (0.9, 0.75, 0.5, 0.3, 0.1)


def layer(name: str, *calls: CallProfile) -> LayerProfile:
    return LayerProfile(name, calls)


def step(layers: list[LayerProfile], base_total_bytes: int = 0) -> StepProfile:
    return StepProfile(tuple(layers), base_total_bytes)


def decisions(profile: LayerProfile) -> Iterator[frozenset[int] | None]:
    ordinals = range(max(len(call.operators) for call in profile.calls))
    yield None
    for size in range(len(ordinals) + 1):
        yield from map(frozenset, combinations(ordinals, size))


def simulate(profile: StepProfile, choices: list[LayerChoice]) -> int:
    """Run the round event by event: what a call keeps is held until its backward ends."""
    calls = [(call, c.decision) for entry, c in zip(profile.layers, choices, strict=True) for call in entry.calls]
    calls.sort(key=lambda pair: pair[0].position)
    held = [
        call.saved_bytes if kept is None else sum(call.operators[o].num_bytes for o in kept) for call, kept in calls
    ]
    peak = profile.base_total_bytes + sum(held)
    for call, kept in reversed(calls):
        held.pop()
        unsaved = sum(call.operators[o].num_bytes for o in kept or () if not call.operators[o].is_saved)
        peak = max(peak, call.base_live_bytes + sum(held) + call.saved_bytes + unsaved)
    return peak


def best_by_brute_force(profile: StepProfile, budget_bytes: int) -> tuple[float, int] | None:
    """Least cost, then least kept bytes, of all plans that fit. A layer's decisions of equal effect are tried once."""
    options = []
    for entry in profile.layers:
        effects = {}
        for decision in decisions(entry):
            effect = tuple((call.kept_bytes(decision), call.working_bytes(decision)) for call in entry.calls)
            choice = entry.choose(decision)
            if effect not in effects or choice.recompute_cost < effects[effect].recompute_cost:
                effects[effect] = choice
        options.append(list(effects.values()))
    fitting = [plan for plan in product(*options) if simulate(profile, plan) <= budget_bytes]
    return min(map(judge, fitting)) if fitting else None


def judge(choices) -> tuple[float, int]:
    return sum(choice.recompute_cost for choice in choices), sum(choice.kept_bytes for choice in choices)


def draw_call(rng: random.Random, position: int, base_live_bytes: int, num_operators: int) -> CallProfile:
    top = rng.choice([3, 10, 1000])  # small numbers give ties, large ones near misses
    operators = tuple(
        OperatorProfile(f"aten.op{i}", rng.randint(0, top), rng.random() < 0.6, float(rng.randint(0, top)))
        for i in range(num_operators)
    )
    saved_bytes = sum(o.num_bytes for o in operators if o.is_saved) + rng.randint(0, top)
    cost = sum(o.cost for o in operators) + rng.randint(0, top)
    return CallProfile(position, base_live_bytes, saved_bytes, cost, operators)


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
        calls = [replace(calls[0], position=i, base_live_bytes=base[i]) for i in range(num_layers)]
    layers = [layer(f"net.{i}", call) for i, call in enumerate(calls)]
    return step(layers, max(base) + rng.choice([0, 10, 500]))


def peak_of(profile: StepProfile, decision: frozenset[int] | None) -> int:
    return simulate(profile, [entry.choose(decision) for entry in profile.layers])


def budgets(profile: StepProfile) -> list[int]:
    minimum, plain = peak_of(profile, frozenset()), peak_of(profile, None)
    return [minimum, *(minimum + int((plain - minimum) * share) for share in SHARES), plain]


def check_promises(profile: StepProfile, plan: CheckpointPlan) -> None:
    assert plan.peak_bytes == simulate(profile, plan.choices) <= plan.budget_bytes
    assert plan.minimum_bytes == peak_of(profile, frozenset())
    assert plan.plain_peak_bytes == peak_of(profile, None)
    assert plan.least_recompute_cost <= plan.recompute_cost


@pytest.mark.slow_except("one-few", "two-few", "four-few")
@pytest.mark.parametrize("seeds", [pytest.param(range(5), id="few"), pytest.param(range(5, 60), id="many")])
@pytest.mark.parametrize(
    ("num_layers", "max_operators"),
    [pytest.param(1, 5, id="one"), pytest.param(2, 4, id="two"), pytest.param(4, 2, id="four")],
)
def test_the_plan_is_the_best_of_all(num_layers: int, max_operators: int, seeds: range) -> None:
    for seed in seeds:
        profile = draw_step(seed, num_layers, max_operators)
        for budget_bytes in budgets(profile):
            plan = solve(profile, budget_bytes)

            assert judge(plan.choices) == best_by_brute_force(profile, budget_bytes), (seed, budget_bytes)
            assert plan.is_proven_best
            check_promises(profile, plan)


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_the_best_of_all_for_twelve_layers(seed: int) -> None:
    profile = draw_step(seed, 12, 0)

    for budget_bytes in budgets(profile)[1::2]:
        plan = solve(profile, budget_bytes)

        assert judge(plan.choices) == best_by_brute_force(profile, budget_bytes)


def draw_repeated(seed: int) -> StepProfile:
    """Layers that are called several times in a row, alike or not."""
    rng = random.Random(seed)
    layers, position, base_live_bytes = [], 0, 0
    for i in range(3):
        first = draw_call(rng, position, base_live_bytes, 2)
        is_alike = rng.random() < 0.5
        calls = []
        for _ in range(rng.randint(1, 3)):
            call = first if is_alike else draw_call(rng, position, base_live_bytes, 2)
            calls.append(replace(call, position=position, base_live_bytes=base_live_bytes))
            position += 1
            base_live_bytes += rng.choice([0, 7])
        layers.append(layer(f"net.{i}", *calls))
    return step(layers, base_live_bytes + 3)


@pytest.mark.slow_except("few")
@pytest.mark.parametrize("seeds", [pytest.param(range(5), id="few"), pytest.param(range(5, 40), id="many")])
def test_calls_in_a_row_share_a_decision_and_the_plan_is_the_best_of_all(seeds: range) -> None:
    for seed in seeds:
        profile = draw_repeated(seed)
        for budget_bytes in budgets(profile):
            plan = solve(profile, budget_bytes)

            assert judge(plan.choices) == best_by_brute_force(profile, budget_bytes), (seed, budget_bytes)
            check_promises(profile, plan)


def interleave(profile: StepProfile) -> StepProfile:
    """Two views through the same layers, as in contrastive training."""
    num_calls = len(profile.layers)
    return step(
        [layer(e.name, *(replace(e.calls[0], position=i + view * num_calls) for view in (0, 1)))
         for i, e in enumerate(profile.layers)],
        profile.base_total_bytes,
    )  # fmt: skip


@pytest.mark.slow_except("few")
@pytest.mark.parametrize("seeds", [pytest.param(range(5), id="few"), pytest.param(range(5, 40), id="many")])
def test_layers_that_take_turns_get_the_best_plan_of_all_too(seeds: range) -> None:
    for seed in seeds:
        profile = interleave(draw_step(seed, 3, 2))
        for budget_bytes in budgets(profile):
            plan = solve(profile, budget_bytes)

            assert judge(plan.choices) == best_by_brute_force(profile, budget_bytes), (seed, budget_bytes)
            assert plan.is_proven_best
            check_promises(profile, plan)


def transformer(num_layers: int, unit_bytes: int = MIB) -> StepProfile:
    """Equal layers: query, key, value, attention, output (not saved), up (four times as wide), down (not saved)."""
    operators = (
        *(OperatorProfile("aten.mm", unit_bytes, True, 1.0) for _ in range(3)),
        OperatorProfile("aten.attention", unit_bytes + unit_bytes // 16, True, 2.0),
        OperatorProfile("aten.addmm", unit_bytes, False, 1.0),
        OperatorProfile("aten.addmm", 4 * unit_bytes, True, 4.0),
        OperatorProfile("aten.addmm", unit_bytes, False, 4.0),
    )
    calls = [CallProfile(i, unit_bytes * (i + 1), 16 * unit_bytes, 16.0, operators) for i in range(num_layers)]
    layers = [layer(f"net.blocks.{i}", call) for i, call in enumerate(calls)]
    return step(layers, unit_bytes * (num_layers + 4))


@pytest.mark.parametrize("share", [0.75, 0.5, 0.3])
def test_a_deep_transformer_uses_its_budget_and_is_proven_best(share: float) -> None:
    profile = transformer(100)
    budget_bytes = int(peak_of(profile, None) * share)

    plan = solve(profile, budget_bytes)

    assert plan.is_proven_best
    assert 0.99 * budget_bytes < plan.peak_bytes <= budget_bytes


def test_equal_layers_with_equal_decisions_stand_together_the_plain_ones_last() -> None:
    plan = solve(transformer(12), 130 * MIB)

    kinds = [(choice.kind, sorted(choice.kept)) for choice in plan.choices]
    runs = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert len(runs) == len(set(map(str, runs)))
    assert [choice.kind for choice in plan.choices] == sorted(choice.kind for choice in plan.choices)


def test_a_single_step_by_hand() -> None:
    """Two layers of 10 saved bytes, 3 of them a product's, which is 6 of the layer's cost of 8; 1 input byte each.

    Both plain need 2 + 20 at the end of the forward. Within 21, one is recomputed but for its product, which costs 2.
    If that is the second, its backward needs 2 + 10 + 10; if it is the first, the second's needs 2 + 3 + 10.
    """
    product = OperatorProfile("aten.mm", 3, True, 6.0)
    profile = step([layer(name, CallProfile(i, i + 1, 10, 8.0, (product,))) for i, name in enumerate("ab")], 2)

    plan = solve(profile, 21)

    assert [choice.decision for choice in plan.choices] == [frozenset({0}), None]
    assert (plan.peak_bytes, plan.plain_peak_bytes, plan.minimum_bytes) == (15, 22, 12)
    assert plan.recompute_cost == 2.0
    assert plan.recompute_share == 2.0 / 16.0


def test_what_is_kept_without_being_saved_counts_in_the_backward_too() -> None:
    operator = OperatorProfile("aten.mm", 4, False, 6.0)
    profile = step([layer("a", CallProfile(0, 1, 10, 8.0, (operator,)))], 5)

    keeping = profile.layers[0].choose(frozenset({0}))

    assert predict_peak(profile, [keeping]) == 1 + 10 + 4
    assert solve(profile, 14).choices[0].decision == frozenset()
    assert solve(profile, 15).choices[0].kind == "plain"


def test_costs_that_are_no_whole_numbers_are_compared_exactly() -> None:
    calls = [CallProfile(i, 0, 10, 0.1 * (i + 1)) for i in range(3)]
    profile = step([layer(str(i), call) for i, call in enumerate(calls)])

    assert [choice.kind for choice in solve(profile, 20).choices] == ["checkpointed", "plain", "plain"]


def test_a_layer_called_before_its_predecessor_in_the_profile_keeps_its_place_in_the_plan() -> None:
    profile = step([layer("late", CallProfile(1, 0, 10, 5.0)), layer("early", CallProfile(0, 0, 10, 1.0))])

    plan = solve(profile, 10)

    assert [(choice.name, choice.kind) for choice in plan.choices] == [("late", "plain"), ("early", "checkpointed")]


def test_a_step_without_layers_is_its_base() -> None:
    plan = solve(step([], 7), 7)

    assert (plan.choices, plan.peak_bytes, plan.recompute_share) == ((), 7, 0.0)


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
        solve(step([layer("a", CallProfile(0, 0, 1, 1.0))], 100), 99)


def test_choices_of_another_model_are_refused() -> None:
    profile = transformer(2)

    with pytest.raises(ValueError, match=r"^choices must be one for each layer of the profile, in its order\.$"):
        predict_peak(profile, [layer_.choose(None) for layer_ in reversed(profile.layers)])


def draw_mixtures(num_layers: int, num_operators: int) -> StepProfile:
    """Layers of products that all differ, as in mixtures of experts."""
    rng = random.Random(0)
    layers = []
    for i in range(num_layers):
        operators = tuple(
            OperatorProfile("aten.mm", rng.randint(10**6, 10**8), rng.random() < 0.7, float(rng.randint(10**9, 10**10)))
            for _ in range(num_operators)
        )
        saved_bytes = 2 * sum(operator.num_bytes for operator in operators)
        cost = 1.1 * sum(operator.cost for operator in operators)
        layers.append(layer(f"net.{i}", CallProfile(i, 10**6 * i, saved_bytes, cost, operators)))
    return step(layers, 10**6 * num_layers)


@pytest.mark.slow_except("40-60")
@pytest.mark.parametrize(("num_layers", "num_operators"), [(40, 60), (200, 64)])
def test_thousands_of_different_operators_leave_a_small_gap_and_the_plan_tells_it(num_layers, num_operators) -> None:
    profile = draw_mixtures(num_layers, num_operators)

    plan = solve(profile, peak_of(profile, None) // 2)

    assert simulate(profile, plan.choices) <= plan.budget_bytes
    assert plan.peak_bytes > 0.99 * plan.budget_bytes
    assert plan.recompute_cost - plan.least_recompute_cost < 1e-3 * profile.cost


@pytest.mark.slow
def test_two_hundred_layers_that_all_differ_are_proven_best() -> None:
    profile = draw_mixtures(200, 1)

    assert solve(profile, peak_of(profile, None) // 2).is_proven_best


def test_plans_for_a_whole_card_are_within_the_budget_to_the_byte() -> None:
    """And no dearer than the best plan for some millionths less."""
    for seed in range(5):
        small = draw_step(seed, 4, 0)
        calls = [replace(e.calls[0], saved_bytes=e.calls[0].saved_bytes * 2**26 + 1) for e in small.layers]
        profile = step([layer(str(i), call) for i, call in enumerate(calls)], 2**33 + 1)
        for budget_bytes in budgets(profile)[1:]:
            for near in (budget_bytes - 1, budget_bytes, budget_bytes + 1):
                plan = solve(profile, near)

                assert simulate(profile, plan.choices) <= near
                assert judge(plan.choices) <= best_by_brute_force(profile, int(near * (1 - 5e-6)))


def test_a_plan_never_leaves_a_tenth_unused_if_another_is_cheaper() -> None:
    for seed in range(4):
        profile = draw_step(seed, 8, 3)
        for budget_bytes in budgets(profile):
            plan = solve(profile, budget_bytes)
            others = chain.from_iterable(
                ([*plan.choices[:i], entry.choose(decision), *plan.choices[i + 1 :]] for decision in decisions(entry))
                for i, entry in enumerate(profile.layers)
            )
            assert all(judge(o) >= judge(plan.choices) for o in others if simulate(profile, o) <= budget_bytes)


def draw_offloadable(seed: int) -> StepProfile:
    """Of all bytes a part cannot travel; calls need some of the base bytes again."""
    rng = random.Random(seed)
    drawn = draw_step(seed, 3, 2)
    layers = []
    for entry in drawn.layers:
        call = entry.calls[0]
        operators = tuple(replace(o, staying_bytes=rng.randint(0, o.num_bytes) // 4) for o in call.operators)
        layers.append(
            layer(
                entry.name,
                replace(
                    call,
                    operators=operators,
                    staying_base_bytes=call.base_live_bytes // 8,
                    staying_saved_bytes=sum(o.staying_bytes for o in operators if o.is_saved),
                    new_input_bytes=call.base_live_bytes // 4,
                    old_input_bytes=rng.choice([0, call.base_live_bytes // 8]),
                ),
            )
        )
    return replace(
        step(layers, drawn.base_total_bytes),
        staying_base_bytes=drawn.base_total_bytes // 8,
        largest_bytes=rng.choice([0, 3]),
    )


@pytest.mark.slow_except("few")
@pytest.mark.parametrize("seeds", [pytest.param(range(6), id="few"), pytest.param(range(6, 60), id="many")])
def test_with_offloading_the_plan_is_the_best_of_all_too(seeds: range) -> None:
    num_offloaded = 0
    for seed in seeds:
        profile = draw_offloadable(seed)
        plans = list(product(*([e.choose(d) for d in decisions(e)] for e in profile.layers)))
        offload_bytes = peak_of(profile, None) // random.Random(seed).choice([1, 2, 4])
        for budget_bytes in budgets(profile):
            plan = solve(profile, budget_bytes, offload_bytes)

            def fits(choices, budget_bytes=budget_bytes, offload_bytes=offload_bytes, profile=profile) -> bool:
                return min(predict_peak(profile, choices, away) for away in {0, offload_bytes}) <= budget_bytes

            assert sum(c.recompute_cost for c in plan.choices) == min(judge(c)[0] for c in plans if fits(c)), seed
            away = plan.offloaded_bytes
            assert plan.peak_bytes == predict_peak(profile, plan.choices, away) <= budget_bytes
            assert away <= offload_bytes
            if away:
                num_offloaded += 1
                assert plan.recompute_cost < solve(profile, budget_bytes).recompute_cost
                assert away == 1 or predict_peak(profile, plan.choices, away - 1) > budget_bytes
    assert num_offloaded > 5


def test_what_the_bus_carries_is_not_recomputed() -> None:
    profile = replace(transformer(12), largest_bytes=4 * MIB)
    budget_bytes = peak_of(profile, None) // 2

    plan = solve(profile, budget_bytes, 400 * MIB)

    assert {choice.kind for choice in plan.choices} == {"plain"}
    assert 0 < plan.offloaded_bytes < 150 * MIB
    assert plan.peak_bytes <= budget_bytes
    assert "offloaded" in format_table(plan)


def test_a_little_bus_saves_a_little_recomputation() -> None:
    profile = replace(transformer(12), largest_bytes=4 * MIB)
    budget_bytes = peak_of(profile, None) // 2

    costs = [solve(profile, budget_bytes, num_bytes * MIB).recompute_cost for num_bytes in (0, 40, 80, 160)]

    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[1] > costs[2] > costs[3] == 0


def test_offloading_reaches_budgets_that_recomputation_does_not() -> None:
    profile = replace(transformer(24), largest_bytes=4 * MIB)
    minimum_bytes = peak_of(profile, frozenset())

    with pytest.raises(BudgetError):
        solve(profile, minimum_bytes - 4 * MIB)
    assert solve(profile, minimum_bytes - 4 * MIB, 1000 * MIB).peak_bytes <= minimum_bytes - 4 * MIB


def draw_layer(rng: random.Random, position: int, num_operators: int) -> LayerProfile:
    operators = tuple(
        OperatorProfile(f"aten.op{i}", rng.randint(0, 10**6), rng.random() < 0.6, rng.random() * 1000)
        for i in range(num_operators)
    )
    saved_bytes = sum(o.num_bytes for o in operators if o.is_saved) + rng.randint(0, 10**6)
    cost = sum(o.cost for o in operators)
    return layer(f"l{position}", CallProfile(position, position * 10**5, saved_bytes, cost, operators))


@pytest.mark.parametrize(
    ("seed", "num_layers", "num_operators", "share"), [(97, 4, 10, 0.4), (161, 12, 5, 0.4), (380, 4, 10, 0.6)]
)
def test_nothing_is_printed(seed: int, num_layers: int, num_operators: int, share: float, capfd) -> None:
    """HiGHS 1.12 prints a line in one of 300 programs: in these."""
    rng = random.Random(seed)
    assert rng.choice([4, 8, 12]) == num_layers
    assert rng.choice([5, 10]) == num_operators
    profile = step([draw_layer(rng, i, num_operators) for i in range(num_layers)], num_layers * 10**5)
    solve(profile, int(share * peak_of(profile, None)))
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == ""


def test_what_others_print_in_the_meantime_is_kept(capfd) -> None:
    with budget_solver._without_debug_lines():
        os.write(1, b"one\nHighsMipSolverData::run();\ntwo\n")
        assert capfd.readouterr().out == ""
    assert capfd.readouterr().out == "one\ntwo\n"
