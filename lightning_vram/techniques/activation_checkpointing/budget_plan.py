"""What a training step saves and costs, what a plan makes of it, and the plan as a table.

Everything here describes one round: a forward and its backward. Base bytes are those that no decision changes: inputs
of layers, what is saved outside of all layers, the loss head. ``budget_solver`` makes the plan.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from lightning_vram.memory.units import format_bytes

Decision = frozenset[int] | None
"""Ordinals, in each call of a layer, of the costly operators whose results are saved; ``None``: it runs plain."""
Decisions = Mapping[str, Decision]
NOTHING: Decision = frozenset()

WINDOW_SHARE = 16
"""Part of what is offloaded that serves copies in flight, on the device, as in ``ActivationOffloading``."""


@dataclass(frozen=True)
class OperatorProfile:
    """The result of one costly operator."""

    name: str  # as in ``torch.ops``: ``"aten.mm"``
    num_bytes: int  # bytes it holds on to if kept: 0 if they are among the base bytes
    is_saved: bool  # whether autograd saves that memory anyway where the layer is plain
    cost: float  # what running it again costs, in FLOP equivalents


@dataclass(frozen=True)
class CallProfile:
    """One call of a layer."""

    layer: str  # path in the model; one decision holds for all its calls
    base_live_bytes: int  # base bytes alive while the backward of this call runs
    saved_bytes: int  # what autograd saves in the call and no one else holds
    cost: float  # what running the whole call again costs, in FLOP equivalents
    operators: tuple[OperatorProfile, ...] = ()  # in the order they run: the place is the ordinal
    input_bytes: int = 0  # base bytes that its backward needs, and fetches if they were offloaded

    def effect(self, decision: Decision) -> tuple[int, int, float]:
        """Return the bytes kept until the backward, those of the call alive during it, and the recomputation's cost."""
        if decision is None:
            return self.saved_bytes, self.saved_bytes, 0.0
        kept = [self.operators[ordinal] for ordinal in decision if ordinal < len(self.operators)]
        unsaved_bytes = sum(operator.num_bytes for operator in kept if not operator.is_saved)
        cost = max(0.0, self.cost - sum(operator.cost for operator in kept))
        return sum(operator.num_bytes for operator in kept), self.saved_bytes + unsaved_bytes, cost


@dataclass(frozen=True)
class StepProfile:
    """One observed round."""

    calls: tuple[CallProfile, ...]  # of all layers, as they ran
    base_total_bytes: int  # base bytes alive at the end of the forward
    other_cost: float = 0.0  # cost of the forward outside all layers. Shares are of the whole forward.
    staying_bytes: int = 0  # the most that can ever be saved of storages that cannot be offloaded
    largest_bytes: int = 0  # the largest storage that can

    @property
    def cost(self) -> float:
        """Cost of the whole forward."""
        return self.other_cost + sum(call.cost for call in self.calls)

    def layers(self) -> dict[str, list[CallProfile]]:
        """Return the calls of each layer, in the order of the first ones."""
        layers: dict[str, list[CallProfile]] = {}
        for call in self.calls:
            layers.setdefault(call.layer, []).append(call)
        return layers

    def decide(self, decision: Decision) -> Decisions:
        """Return one decision for all layers."""
        return {call.layer: decision for call in self.calls}

    def recompute_cost(self, decisions: Decisions) -> float:
        """Cost of all that runs again; layers without a decision recompute everything."""
        return sum(call.effect(decisions.get(call.layer, NOTHING))[2] for call in self.calls)


@dataclass(frozen=True)
class CheckpointPlan:
    """A decision for every layer, and what it comes to."""

    decisions: Decisions
    peak_bytes: int = 0  # predicted peak of activation bytes
    plain_peak_bytes: int = 0  # the same without any recomputation
    minimum_bytes: int = 0  # the same with every layer checkpointed and nothing kept: the least budget
    recompute_share: float = 0.0  # what runs again, as a share of the forward
    offloaded_bytes: int = 0  # of what the forward saves first, so much is to be away until its backward
    largest_bytes: int = 0  # the largest storage among them: tensors are not cut, so that much more may travel
    table: str = field(default="", repr=False)


def predict_peak(step: StepProfile, decisions: Decisions, offloaded_bytes: int = 0) -> int:
    """Predict the peak activation bytes of a round; exact if nothing is offloaded, else an upper bound."""
    return find_peak(step, decisions, offloaded_bytes)[0]


def find_peak(step: StepProfile, decisions: Decisions, offloaded_bytes: int = 0) -> tuple[int, str]:
    """Predict the peak as :func:`predict_peak` does, and say where in the round it is.

    Of the bytes saved in an offloaded round, the first are on the host. A window serves copies in flight and the last
    tensors; half of the excess that stays on the device is used, once it is free, for prefetching.
    """
    moments, kept_bytes = [], 0  # bytes saved until then, what else is alive, what is fetched, and where it is
    for call in step.calls:
        kept, working, _ = call.effect(decisions.get(call.layer, NOTHING))
        place = f"in the backward of {call.layer!r}"
        moments.append((call.base_live_bytes + kept_bytes, working, call.input_bytes, place))
        kept_bytes += kept
    total_bytes = step.base_total_bytes + kept_bytes
    moments.append((total_bytes, 0, 0, "at the end of the forward"))
    if not offloaded_bytes:
        return max((saved + working, place) for saved, working, _, place in moments)
    window_bytes = max(step.largest_bytes, -(-total_bytes // WINDOW_SHARE))
    ahead_bytes = -(-max(0, total_bytes - offloaded_bytes) // 2)
    peaks = []
    for saved_bytes, working_bytes, fetched_bytes, place in moments:
        left_bytes = max(saved_bytes - offloaded_bytes, min(saved_bytes, step.staying_bytes) + ahead_bytes)
        peaks.append((left_bytes + window_bytes + fetched_bytes + working_bytes, place))
    return max(peaks)


_NAME_WIDTH, _SAVED_WIDTH = 29, 24
_HEADINGS = ("layers", "saved for backward", "each layer", "recomputed")


def format_table(step: StepProfile, plan: CheckpointPlan, budget_bytes: int) -> str:
    """Write the plan as text of at most 80 columns; one sentence where the budget changes nothing.

    Neighbours with equal cells share a line. Recomputation is a share of the layer's forward.
    """
    if plan.peak_bytes == plan.plain_peak_bytes and not plan.recompute_share and not plan.offloaded_bytes:
        sizes = f"{format_bytes(plan.peak_bytes)}, are within the budget of {format_bytes(budget_bytes)}"
        return f"All activations, {sizes}: nothing is recomputed."
    rows = [_HEADINGS, *_rows(step, plan.decisions)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {saved:<{widths[1]}}  {size:>{widths[2]}}  {again:>{widths[3]}}".rstrip()
        for name, saved, size, again in rows
    ]
    rule = "-" * max(map(len, lines))
    part = plan.peak_bytes / max(1, budget_bytes)
    totals = {
        "budget": format_bytes(budget_bytes),
        "predicted peak": f"{format_bytes(plan.peak_bytes)} ({part:.1%} of the budget)",
        "baseline peak": format_bytes(plan.plain_peak_bytes),
        "minimum": format_bytes(plan.minimum_bytes),
        "offloaded": f"{format_bytes(plan.offloaded_bytes)} of each forward" if plan.offloaded_bytes else "",
        "extra compute": f"{_format_share(plan.recompute_share)} of the forward",
    }
    lines += [rule, *(f"{name:<14}  {text}" for name, text in totals.items() if text)]
    return "\n".join([lines[0], rule, *lines[1:]])


def _rows(step: StepProfile, decisions: Decisions) -> Iterator[tuple[str, str, str, str]]:
    entries = [(name, _cells(calls, decisions[name])) for name, calls in step.layers().items()]
    for cells, run in groupby(entries, key=itemgetter(1)):
        yield _name_run([name for name, _ in run]), *cells


def _name_run(names: list[str]) -> str:
    """Name the first and the last of some layers; of long names the end, which tells layers apart."""
    if len(names) == 1:
        return _shorten(names[0], _NAME_WIDTH)
    first, last, count = names[0], names[-1], f" ({len(names)})"
    own = last.rpartition(".")[2] if first.rpartition(".")[0] == last.rpartition(".")[0] else last
    whole = f"{first} ... {own}{count}"
    each = (_NAME_WIDTH - len(count) - len(" ... ")) // 2
    return whole if len(whole) <= _NAME_WIDTH else f"{_shorten(first, each)} ... {_shorten(last, each)}{count}"


def _shorten(name: str, width: int) -> str:
    return name if len(name) <= width else ".." + name[2 - width :]


def _cells(calls: list[CallProfile], decision: Decision) -> tuple[str, str, str]:
    kept_bytes = sum(call.effect(decision)[0] for call in calls)
    size = format_bytes(kept_bytes) if kept_bytes else ""
    if decision is None:
        return "all activations", size, "nothing"
    cost, whole = sum(call.effect(decision)[2] for call in calls), sum(call.cost for call in calls)
    again = _format_share(cost / whole) if cost else "nothing"
    names = Counter(op.name.removeprefix("aten.") for c in calls for i, op in enumerate(c.operators) if i in decision)
    listed = ", ".join((f"{count} x " if count > 1 else "") + name for name, count in sorted(names.items()))
    saved = f"outputs of {listed}" if listed else "inputs only"
    if len(saved) > _SAVED_WIDTH:
        saved = f"{sum(names.values())} intermediate output{'s' * (sum(names.values()) > 1)}"
    return saved, size, again


def _format_share(share: float) -> str:
    return "< 0.1%" if 0 < share < 0.0005 else f"{share:.1%}"
