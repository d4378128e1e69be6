"""The cheapest recomputation that keeps a step's activations within a byte budget.

Every layer is plain, or checkpointed with some outputs of its costly operators kept. Let ``K`` be what the calls before
call ``i`` keep. While the backward of ``i`` runs, the calls after it are gone and what it recomputes is there::

    base_live[i] + K + working_i(choice) <= budget      for every call
    base_total + (what all calls keep)   <= budget      at the end of the forward

Among the plans that hold to this, :func:`solve` gives the one that recomputes least, and of several such the one that
keeps least. All of it is linear in choices of 0 or 1, however calls of layers interleave, so it is stated once
(``program.py``) and solved exactly by HiGHS, ``scipy.optimize.milp``.

With ``offload_bytes`` the first of what the calls save, base bytes too, are away: ``live_bytes`` of
:class:`~lightning_vram.techniques.activation_checkpointing.budget.peak.Traffic` takes the place of ``base_live + K``.

Limits. A plan within some millionths of the budget may be passed over for the next best. Proofs end after 200 nodes,
and from 2000 choices on a plan may recompute up to a thousandth of the forward more than the best: then
``least_recompute_cost`` is below the plan's. Measured on one core at 0.15 to 0.9 of the plain peak: 12 to 100 equal
transformer layers of 8 operators take 0.02 to 0.5 s, 200 convolution layers that all differ 0.1 to 0.7 s, 200 layers
with 64 products of different sizes, as in mixtures of experts, 0.4 to 5 s; offloading takes as long once more.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_vram.memory.units import format_argument, format_bytes
from lightning_vram.techniques.activation_checkpointing.budget.peak import find_peak, predict_peak
from lightning_vram.techniques.activation_checkpointing.budget.plan import (
    CallProfile,
    CheckpointPlan,
    LayerChoice,
    StepProfile,
)
from lightning_vram.techniques.activation_checkpointing.budget.program import KeepProgram

__all__ = ["BudgetError", "predict_peak", "solve"]

_LEAST_STEP = 1e-9  # of the budget: HiGHS may be above it by up to a millionth


class BudgetError(ValueError):
    """No choice fits the budget."""

    def __init__(self, budget_bytes: int, minimum_bytes: int, place: str) -> None:
        super().__init__(
            f"budget={format_bytes(budget_bytes)} is below the minimum of {format_bytes(minimum_bytes)}, which is "
            f"reached {place} with every layer checkpointed. Give at least "
            f"budget='{format_argument(minimum_bytes, round_up=True)}', a smaller batch, or smaller layers."
        )
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes


def solve(profile: StepProfile, budget_bytes: int, offload_bytes: int = 0) -> CheckpointPlan:
    """Choose what every layer keeps so that the least is recomputed within a budget.

    Args:
        profile: What was observed in one round.
        budget_bytes: Limit of activation bytes at any time of the round.
        offload_bytes: At most so many travel to the host, beside the computation: nothing is recomputed that they
            make room for, and no more of them travel than are needed.

    Returns:
        The plan. Its predicted peak is within the budget.

    Raises:
        BudgetError: If even full checkpointing of every layer does not fit.

    Example:
        >>> from lightning_vram.techniques.activation_checkpointing.budget.plan import LayerProfile
        >>> call = CallProfile(position=0, base_live_bytes=10, saved_bytes=100, cost=5.0)
        >>> profile = StepProfile((LayerProfile("net", (call,)),), base_total_bytes=20)
        >>> solve(profile, 119).choices[0].kind, solve(profile, 120).choices[0].kind
        ('checkpointed', 'plain')
    """
    nothing = [layer.choose(frozenset()) for layer in profile.layers]
    minimum_bytes, place = min(find_peak(profile, nothing, num_bytes) for num_bytes in {0, offload_bytes})
    if budget_bytes < minimum_bytes:
        raise BudgetError(budget_bytes, minimum_bytes, place)
    offloaded_bytes = 0
    choices, least_cost = _choose(profile, budget_bytes, 0)
    if offload_bytes and (_cost(choices) > 0 or predict_peak(profile, choices) > budget_bytes):
        others, least_of_others = _choose(profile, budget_bytes, offload_bytes)
        fits = predict_peak(profile, others, offload_bytes) <= budget_bytes
        if fits and (_cost(others) < _cost(choices) or predict_peak(profile, choices) > budget_bytes):
            choices, offloaded_bytes = others, _find_least_offload(profile, others, budget_bytes, offload_bytes)
        least_cost = min(least_cost, least_of_others)
    return CheckpointPlan(
        profile=profile,
        choices=tuple(choices),
        budget_bytes=budget_bytes,
        peak_bytes=predict_peak(profile, choices, offloaded_bytes),
        plain_peak_bytes=predict_peak(profile, [layer.choose(None) for layer in profile.layers]),
        minimum_bytes=minimum_bytes,
        least_recompute_cost=min(least_cost, _cost(choices)),
        offloaded_bytes=offloaded_bytes,
    )


def _choose(profile: StepProfile, budget_bytes: int, offload_bytes: int) -> tuple[list[LayerChoice], float]:
    """Return the choices, and what any within the budget recompute at least."""
    limit_bytes, less_bytes = budget_bytes, max(1, round(_LEAST_STEP * budget_bytes))
    least_cost: float | None = None
    while (found := KeepProgram(profile, limit_bytes, offload_bytes).solve()) is not None:
        choices = _decide(profile, found.decisions)
        if least_cost is None:
            least_cost = max(0.0, _cost(choices) - found.gap)
        if predict_peak(profile, choices, offload_bytes) <= budget_bytes:
            gathered = _gather(profile, choices)
            is_better = predict_peak(profile, gathered, offload_bytes) <= budget_bytes
            return (gathered if is_better else choices), least_cost
        limit_bytes, less_bytes = budget_bytes - less_bytes, 4 * less_bytes
    nothing = [layer.choose(frozenset()) for layer in profile.layers]
    return nothing, _cost(nothing) if least_cost is None else least_cost


def _find_least_offload(
    profile: StepProfile, choices: Sequence[LayerChoice], budget_bytes: int, offload_bytes: int
) -> int:
    """Return the fewest bytes that have to be away: the fewer stay, the lower is the peak."""
    return 1 + bisect_left(
        range(1, offload_bytes),
        True,  # noqa: FBT003
        key=lambda num_bytes: predict_peak(profile, choices, num_bytes) <= budget_bytes,
    )


def _cost(choices: Iterable[LayerChoice]) -> float:
    return sum(choice.recompute_cost for choice in choices)


def _decide(profile: StepProfile, decisions: Iterable[frozenset[int] | None]) -> list[LayerChoice]:
    return [layer.choose(decision) for layer, decision in zip(profile.layers, decisions, strict=True)]


def _gather(profile: StepProfile, choices: Sequence[LayerChoice]) -> list[LayerChoice]:
    """Let equal layers exchange their decisions so that equal ones stand together, those that keep most last.

    Cost and kept bytes stay; the peak falls as a rule, since what is kept late is freed first.
    """
    decided = {choice.name: choice for choice in choices}
    alike: defaultdict[tuple[CallProfile, ...], list[str]] = defaultdict(list)
    for layer in sorted(profile.layers, key=lambda layer: layer.calls[0].position):
        alike[tuple(replace(call, position=0, base_live_bytes=0, staying_base_bytes=0) for call in layer.calls)].append(
            layer.name
        )
    exchanged: dict[str, frozenset[int] | None] = {}
    for names in alike.values():
        ranked = sorted((decided[name] for name in names), key=lambda c: (c.kept_bytes, c.kind, sorted(c.kept)))
        exchanged.update(zip(names, (choice.decision for choice in ranked), strict=True))
    return _decide(profile, (exchanged[layer.name] for layer in profile.layers))
