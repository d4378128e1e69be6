"""What a training step was seen to keep and to cost, and the plan that a byte budget makes of it.

Everything is told of one round: a forward and the backward after it. Layers are called in some order; a call has a
position in it. Bytes that stay whatever is chosen (inputs of layers, what is saved outside of all layers, the loss
head) are base bytes. All here is plain data; ``solver.py`` makes the plan.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import isfinite
from typing import Literal


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
