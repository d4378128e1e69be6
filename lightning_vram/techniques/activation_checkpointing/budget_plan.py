"""What a training step saves and costs, and the plan that meets a byte budget.

All of it describes one round: a forward and its backward. Each call of a layer has a position in the round. Base bytes
are those that no choice changes: inputs of layers, what is saved outside of all layers, the loss head. Everything here
is plain data; ``budget_solver`` makes the plan.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from math import isfinite
from operator import itemgetter
from typing import Literal

from lightning_vram.memory.units import format_bytes


@dataclass(frozen=True)
class OperatorProfile:
    """The output of one costly operator."""

    name: str  # as in ``torch.ops``: ``"aten.mm"``
    num_bytes: int  # bytes it holds on to if kept: 0 if they are among the base bytes or kept by an earlier operator
    is_saved: bool  # whether autograd saves that memory anyway where the layer is plain
    cost: float  # what running it again costs, in FLOP equivalents
    staying_bytes: int = 0  # of ``num_bytes``, those that cannot be offloaded

    def __post_init__(self) -> None:
        _require_amounts(self.name, num_bytes=self.num_bytes, cost=self.cost, staying_bytes=self.staying_bytes)


@dataclass(frozen=True)
class CallProfile:
    """One call of a layer."""

    position: int  # place among all calls of the round
    base_live_bytes: int  # base bytes alive while the backward of this call runs
    saved_bytes: int  # what autograd saves in the call and no one else holds
    cost: float  # what running the whole call again costs, in FLOP equivalents
    # In the order they run: the place is the ordinal.
    operators: tuple[OperatorProfile, ...] = ()
    staying_base_bytes: int = 0  # of ``base_live_bytes``, those that cannot be offloaded
    staying_saved_bytes: int = 0  # the same of ``saved_bytes``
    # Base bytes that the backward of this call needs and that no earlier call had, if offloaded
    new_input_bytes: int = 0
    old_input_bytes: int = 0  # the same of those that an earlier call had

    def __post_init__(self) -> None:
        amounts = {"base_live_bytes": self.base_live_bytes, "saved_bytes": self.saved_bytes, "cost": self.cost}
        _require_amounts(f"the call at position {self.position}", position=self.position, **amounts)

    def kept_bytes(self, kept: frozenset[int] | None) -> int:
        """Bytes the call keeps until its backward, if these ordinals are kept; ``None`` stands for a plain call."""
        if kept is None:
            return self.saved_bytes
        return sum(operator.num_bytes for operator in self._select(kept))

    def staying_bytes(self, kept: frozenset[int] | None) -> int:
        """Of :meth:`kept_bytes`, those that cannot be offloaded."""
        if kept is None:
            return self.staying_saved_bytes
        return sum(operator.staying_bytes for operator in self._select(kept))

    def working_bytes(self, kept: frozenset[int] | None) -> int:
        """Bytes of the call that are alive during its backward, after what was not kept has been recomputed."""
        unsaved = (operator for operator in self._select(kept or frozenset()) if not operator.is_saved)
        return self.saved_bytes + sum(operator.num_bytes for operator in unsaved)

    def recompute_cost(self, kept: frozenset[int] | None) -> float:
        """Cost of what runs again."""
        if kept is None:
            return 0.0
        return max(0.0, self.cost - sum(operator.cost for operator in self._select(kept)))

    def _select(self, kept: frozenset[int]) -> Iterator[OperatorProfile]:
        return (operator for ordinal, operator in enumerate(self.operators) if ordinal in kept)


@dataclass(frozen=True)
class LayerProfile:
    """A layer and its calls in one round. One decision holds for all of them."""

    name: str  # path in the model
    calls: tuple[CallProfile, ...]  # at least one, in order of their positions

    def __post_init__(self) -> None:
        positions = [call.position for call in self.calls]
        if not positions or positions != sorted(set(positions)):
            raise ValueError(f"calls of {self.name!r} must have rising positions, got {positions}.")

    @property
    def cost(self) -> float:
        """What running all calls again costs."""
        return sum(call.cost for call in self.calls)

    def choose(self, kept: frozenset[int] | None) -> "LayerChoice":
        """Return the choice to save outputs of these ordinals and recompute the rest; ``None``: run plain."""
        operators = list(chain.from_iterable(call._select(kept or frozenset()) for call in self.calls))
        return LayerChoice(
            name=self.name,
            kind="plain" if kept is None else "checkpointed",
            kept=kept or frozenset(),
            kept_bytes=sum(call.kept_bytes(kept) for call in self.calls),
            recompute_cost=sum(call.recompute_cost(kept) for call in self.calls),
            operators=tuple(sorted(Counter(operator.name for operator in operators).items())),
        )


@dataclass(frozen=True)
class StepProfile:
    """One observed round."""

    layers: tuple[LayerProfile, ...]  # layers with different names; no two calls share a position
    base_total_bytes: int  # base bytes alive at the end of the forward
    other_cost: float = 0.0  # cost of the forward outside all layers. Shares are of the whole forward.
    staying_base_bytes: int = 0  # of ``base_total_bytes``, those that cannot be offloaded
    largest_bytes: int = 0  # the largest storage that can be

    def __post_init__(self) -> None:
        _require_amounts("the step", base_total_bytes=self.base_total_bytes, other_cost=self.other_cost)
        for what, found in (
            ("names", [layer.name for layer in self.layers]),
            ("positions", [call.position for layer in self.layers for call in layer.calls]),
        ):
            repeated = [item for item, count in Counter(found).items() if count > 1]
            if repeated:
                raise ValueError(f"{what} must not repeat in a step, got {repeated[0]!r} twice.")

    @property
    def cost(self) -> float:
        """Cost of the whole forward."""
        return self.other_cost + sum(layer.cost for layer in self.layers)


@dataclass(frozen=True)
class LayerChoice:
    """The decision for one layer. :meth:`LayerProfile.choose` makes it."""

    name: str
    kind: Literal["plain", "checkpointed"]
    kept: frozenset[int]  # ordinals, in each call, of the operators whose outputs are saved; empty if plain
    kept_bytes: int  # what all its calls keep until their backward
    recompute_cost: float  # cost of what runs again, in FLOP equivalents
    operators: tuple[tuple[str, int], ...] = ()  # names of the kept operators, with how many there are in all calls

    @property
    def decision(self) -> frozenset[int] | None:
        """What :meth:`LayerProfile.choose` takes: the kept ordinals, or ``None`` for a plain layer."""
        return None if self.kind == "plain" else self.kept


@dataclass(frozen=True)
class CheckpointPlan:
    """A decision for every layer."""

    profile: StepProfile
    choices: tuple[LayerChoice, ...]  # one for each layer of the profile, in its order
    budget_bytes: int
    peak_bytes: int  # predicted peak of activation bytes
    plain_peak_bytes: int  # the same without any recomputation
    minimum_bytes: int  # the same with every layer checkpointed and nothing kept: the least budget
    # no plan within the budget recomputes less than this. It equals :attr:`recompute_cost` where the plan is proven
    # best; it is smaller where the search was cut short.
    least_recompute_cost: float
    offloaded_bytes: int = 0  # of what the forward saves first, so much is to be away until its backward

    @cached_property
    def recompute_cost(self) -> float:
        """Cost of all that runs again, in FLOP equivalents."""
        return sum(choice.recompute_cost for choice in self.choices)

    @property
    def recompute_share(self) -> float:
        """What runs again, as a share of the forward."""
        return self.recompute_cost / self.profile.cost if self.profile.cost else 0.0

    @property
    def is_proven_best(self) -> bool:
        """Whether no plan within the budget recomputes less."""
        return self.least_recompute_cost >= self.recompute_cost


def _require_amounts(owner: str, **amounts: float) -> None:
    for name, amount in amounts.items():
        if not isfinite(amount) or amount < 0:
            raise ValueError(f"{name} of {owner} must be finite and not negative, got {amount}.")


def predict_peak(profile: StepProfile, choices: Sequence[LayerChoice], offloaded_bytes: int = 0) -> int:
    """Predict the peak activation bytes of a round; exact if nothing is offloaded, else an upper bound."""
    return find_peak(profile, choices, offloaded_bytes)[0]


def find_peak(profile: StepProfile, choices: Sequence[LayerChoice], offloaded_bytes: int = 0) -> tuple[int, str]:
    """Predict the peak as :func:`predict_peak` does, and say where in the round it is."""
    if [choice.name for choice in choices] != [layer.name for layer in profile.layers]:
        raise ValueError("choices must be one for each layer of the profile, in its order.")
    decided = [(call, choice) for layer, choice in zip(profile.layers, choices, strict=True) for call in layer.calls]
    total_bytes = profile.base_total_bytes + sum(choice.kept_bytes for choice in choices)
    traffic = None
    if offloaded_bytes:
        staying_bytes = profile.staying_base_bytes + sum(call.staying_bytes(c.decision) for call, c in decided)
        traffic = Traffic(total_bytes - staying_bytes, offloaded_bytes, profile.largest_bytes)
    peak, place, kept_bytes, staying_bytes = 0, "at the end of the forward", 0, 0
    for call, choice in sorted(decided, key=lambda pair: pair[0].position):
        live_bytes = call.base_live_bytes + kept_bytes
        if traffic is not None:
            live_bytes = traffic.live_bytes(live_bytes, call.staying_base_bytes + staying_bytes, call)
        live_bytes += call.working_bytes(choice.decision)
        if live_bytes > peak:
            peak, place = live_bytes, f"in the backward of {choice.name!r}"
        kept_bytes += call.kept_bytes(choice.decision)
        staying_bytes += call.staying_bytes(choice.decision)
    if traffic is not None:
        total_bytes += traffic.window_bytes + traffic.excess_bytes - traffic.total_bytes
    if total_bytes >= peak:
        peak, place = total_bytes, "at the end of the forward"
    return peak, place


WINDOW_SHARE = 16
"""Part of what travels that serves the traffic, on the device, as in ``ActivationOffloading``."""


class Traffic:
    """Device memory of the tensors that an offloaded round may offload.

    The first ones, up to ``offloaded_bytes``, are on the host. A window serves copies in flight and the last tensors;
    half of the excess that stays on the device is used, once it is free, for prefetching.
    """

    def __init__(self, total_bytes: int, offloaded_bytes: int, largest_bytes: int) -> None:
        self.total_bytes = total_bytes  # saved in the round, and large enough to offload
        self.offloaded_bytes = offloaded_bytes
        self.window_bytes = max(largest_bytes, -(-total_bytes // WINDOW_SHARE))
        self.excess_bytes = max(0, total_bytes - offloaded_bytes)

    def live_bytes(self, before_bytes: int, staying_bytes: int, call: CallProfile) -> int:
        """Return the bytes alive during ``call`` besides its working bytes, of ``before_bytes`` saved until then."""
        ahead_bytes = -(-self.excess_bytes // 2) + call.new_input_bytes
        left_bytes = max(before_bytes - staying_bytes - self.offloaded_bytes, ahead_bytes)
        return staying_bytes + call.old_input_bytes + self.window_bytes + left_bytes


_NAME_WIDTH = 29
_SAVED_WIDTH = 24
_HEADINGS = ("layers", "saved for backward", "each layer", "recomputed")


def format_table(plan: CheckpointPlan) -> str:
    """Write the plan as text of at most 80 columns; one sentence where the budget changes nothing.

    Neighbours with equal cells share a line. Recomputation is a share of the layer's forward.
    """
    if plan.peak_bytes == plan.plain_peak_bytes and not plan.recompute_cost and not plan.offloaded_bytes:
        sizes = f"{format_bytes(plan.peak_bytes)}, are within the budget of {format_bytes(plan.budget_bytes)}"
        return f"All activations, {sizes}: nothing is recomputed."
    rows = [_HEADINGS, *_rows(plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {saved:<{widths[1]}}  {size:>{widths[2]}}  {again:>{widths[3]}}".rstrip()
        for name, saved, size, again in rows
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:], rule, *_totals(plan)])


def _rows(plan: CheckpointPlan) -> Iterator[tuple[str, str, str, str]]:
    costs = [layer.cost for layer in plan.profile.layers]
    entries = [(choice.name, _cells(choice, cost)) for choice, cost in zip(plan.choices, costs, strict=True)]
    for cells, run in groupby(entries, key=itemgetter(1)):
        yield _name_run([name for name, _ in run]), *cells


def _totals(plan: CheckpointPlan) -> Iterator[str]:
    yield f"budget          {format_bytes(plan.budget_bytes)}"
    used = f" ({_share(plan.peak_bytes, plan.budget_bytes):.1%} of the budget)"
    yield f"predicted peak  {format_bytes(plan.peak_bytes)}{used}"
    yield f"baseline peak   {format_bytes(plan.plain_peak_bytes)}"
    yield f"minimum         {format_bytes(plan.minimum_bytes)}"
    if plan.offloaded_bytes:
        yield f"offloaded       {format_bytes(plan.offloaded_bytes)} of each forward"
    again = f"extra compute   {_format_share(plan.recompute_share)} of the forward"
    if not plan.is_proven_best:
        least = _share(plan.least_recompute_cost, plan.profile.cost)
        again += f" (the best plan may need as little as {_format_share(least)})"
    yield again


def _cells(choice: LayerChoice, cost: float) -> tuple[str, str, str]:
    size = format_bytes(choice.kept_bytes) if choice.kept_bytes else ""
    if choice.kind == "plain":
        return "all activations", size, "nothing"
    again = _format_share(_share(choice.recompute_cost, cost)) if choice.recompute_cost else "nothing"
    return _saved(choice) if choice.operators else "inputs only", size, again


def _saved(choice: LayerChoice) -> str:
    names = [(f"{count} x " if count > 1 else "") + name.removeprefix("aten.") for name, count in choice.operators]
    listed = f"outputs of {', '.join(names)}"
    num_outputs = sum(count for _, count in choice.operators)
    return listed if len(listed) <= _SAVED_WIDTH else f"{num_outputs} intermediate output{'s' * (num_outputs > 1)}"


def _name_run(names: list[str]) -> str:
    first, last = names[0], names[-1]
    if len(names) == 1:
        return _shorten(first, _NAME_WIDTH)
    count = f" ({len(names)})"
    parent, _, own = last.rpartition(".")
    whole = f"{first} ... {own if parent == first.rpartition('.')[0] else last}{count}"
    if len(whole) <= _NAME_WIDTH:
        return whole
    each = (_NAME_WIDTH - len(count) - len(" ... ")) // 2
    return f"{_shorten(first, each)} ... {_shorten(last, each)}{count}"


def _shorten(name: str, width: int) -> str:
    """Keep the end: it tells layers apart."""
    return name if len(name) <= width else ".." + name[2 - width :]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _format_share(share: float) -> str:
    return "< 0.1%" if 0 < share < 0.0005 else f"{share:.1%}"
