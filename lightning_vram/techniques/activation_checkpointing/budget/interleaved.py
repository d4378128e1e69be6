"""Layers whose calls interleave: stated so that no plan is above the budget, then improved by the exact prediction.

A layer with several calls is exact as long as no other layer is called between them. Else (two views through one
encoder) all it keeps is counted from its first call on, and its later calls with what all layers keep, which is too
much, never too little. Larger budgets and single changes are then tried.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from lightning_vram.techniques.activation_checkpointing.budget.layer_options import (
    LayerRow,
    find_scale,
    good_options,
    look_inside,
)
from lightning_vram.techniques.activation_checkpointing.budget.plan import (
    LayerChoice,
    LayerProfile,
    StepProfile,
    predict_peak,
)
from lightning_vram.techniques.activation_checkpointing.budget.search import PlanSearch

_BUDGETS_TRIED = 10  # where calls of layers interleave


def arrange_search(layers: Sequence[LayerProfile], base_total_bytes: int, budget_bytes: int, scale: int) -> PlanSearch:
    """State the problem so that no plan that fits it is above the budget.

    A call that a later layer was called before is a late one. Where there is none, the problem is exact. A late call
    is held to what all layers keep altogether.
    """
    next_firsts: list[float] = [*(layer.calls[0].position for layer in layers[1:]), inf]
    rows, end_base_bytes = [], base_total_bytes
    for layer, next_first in zip(layers, next_firsts, strict=False):  # no layers, one infinity
        calls = [call for call in layer.calls if call.position < next_first]
        late = layer.calls[len(calls) :]
        end_base_bytes = max([end_base_bytes, *(call.base_live_bytes + call.saved_bytes for call in late)])
        inside = look_inside(layer, calls, scale)
        rows.append(LayerRow(calls[0].base_live_bytes, inside))
    return PlanSearch(rows, end_base_bytes, budget_bytes)


def choose_layers(
    profile: StepProfile, layers: Sequence[LayerProfile], decisions: Sequence[frozenset[int] | None]
) -> list[LayerChoice]:
    """Bring decisions for layers in the order of their calls into the order of the profile."""
    by_name = {layer.name: decision for layer, decision in zip(layers, decisions, strict=True)}
    return [layer.choose(by_name[layer.name]) for layer in profile.layers]


def judge(choices: Sequence[LayerChoice]) -> tuple[float, int]:
    """What a plan is judged by."""
    return sum(choice.recompute_cost for choice in choices), sum(choice.kept_bytes for choice in choices)


def is_interleaved(layers: Sequence[LayerProfile]) -> bool:
    """Whether another layer is called between two calls of one."""
    return any(one.calls[-1].position > other.calls[0].position for one, other in pairwise(layers))


def improve_interleaved(
    profile: StepProfile, layers: Sequence[LayerProfile], choices: list[LayerChoice], budget_bytes: int
) -> list[LayerChoice]:
    """Search with larger budgets for plans that are in truth within the real one, then improve single layers."""
    scale = find_scale(layers)
    low, high = budget_bytes, budget_bytes + sum(call.saved_bytes for layer in layers for call in layer.calls)
    for _ in range(_BUDGETS_TRIED):
        middle = (low + high) // 2
        found = arrange_search(layers, profile.base_total_bytes, middle, scale).solve()
        candidate = choose_layers(profile, layers, found.prefix.decisions())
        if predict_peak(profile, candidate) > budget_bytes:
            high = middle
        else:
            low = middle
            choices = min(choices, candidate, key=judge)
    return _improve_single_layers(profile, choices, budget_bytes)


def _improve_single_layers(profile: StepProfile, choices: list[LayerChoice], budget_bytes: int) -> list[LayerChoice]:
    scale = find_scale(profile.layers)
    options = [
        [layer.choose(o.kept) for o in good_options(look_inside(layer, layer.calls, scale), budget_bytes)]
        for layer in profile.layers
    ]
    is_improved = True
    while is_improved:
        is_improved = False
        for index, better in enumerate(options):
            for option in better:
                candidate = [*choices[:index], option, *choices[index + 1 :]]
                is_cheaper = judge([option]) < judge([choices[index]])
                if is_cheaper and predict_peak(profile, candidate) <= budget_bytes:
                    choices, is_improved = candidate, True
    return choices


def bound_interleaved(layers: Sequence[LayerProfile], base_total_bytes: int, budget_bytes: int) -> float:
    """Lower bound of the cost that looks at the end of the forward only, where the order of calls does not matter."""
    scale = find_scale(layers)
    rows = []
    for layer in layers:
        inside = look_inside(layer, layer.calls, scale)
        groups = tuple(group._replace(loads=(0,)) for group in inside.groups)
        plain = inside.plain._replace(need_bytes=0)
        rows.append(LayerRow(0, inside._replace(plain=plain, floors=(0,), groups=groups)))
    return PlanSearch(rows, base_total_bytes, budget_bytes).least_cost / scale
