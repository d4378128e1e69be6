"""What was observed in a step, and the plain data that a plan is made from."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.tensors.versions import version_of
from lightning_vram.techniques.activation_checkpointing.budget.plan import (
    CallProfile,
    LayerProfile,
    OperatorProfile,
    StepProfile,
)

_OTHER_BYTES = 8192  # the loss, its gradient, what is logged, samples for comparison: alive, and saved by nobody


@dataclass
class Operator:
    """One operator in one call. ``storages`` and ``counter`` are there for costly ones only."""

    name: str
    cost: float
    num_saves: int  # of the call, before it ran
    storages: dict[int, int] | None = None  # bytes by number
    counter: Tensor | None = None
    version: int = 0

    def profile(self, call: "Call", held: Collection[int], staying: Collection[int]) -> OperatorProfile:
        """A result that is overwritten, or made after the last that is saved, is never kept: it gains nothing."""
        assert self.storages is not None
        is_overwritten = self.counter is not None and version_of(self.counter) != self.version
        if is_overwritten or self.num_saves == call.num_saves:
            return OperatorProfile(self.name, 0, is_saved=True, cost=0.0)
        new = [number for number in self.storages if number not in held]
        return OperatorProfile(
            self.name,
            num_bytes=sum(self.storages[number] for number in new),
            is_saved=all(number in call.saved for number in new),
            cost=self.cost,
            staying_bytes=sum(self.storages[number] for number in new if number in staying),
        )


@dataclass
class Call:
    """One call of a layer."""

    layer: str
    position: int
    operators: list[Operator] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)  # bytes by storage
    inputs: set[int] = field(default_factory=set)  # base storages that its backward needs
    num_saves: int = 0

    def profile(self, base: dict[int, tuple[float, int]], staying: Collection[int]) -> CallProfile:
        """Say what it keeps beside the storages in ``base``, and costs. Those in ``staying`` are never offloaded."""
        kept: set[int] = set()
        operators = []
        reached = [operator for operator in self.operators if operator.num_saves < self.num_saves]  # by a second run
        for operator in self.operators:
            if operator.storages is not None:
                operators.append(operator.profile(self, base.keys() | kept, staying))
                kept.update(operator.storages)
        before = {number: size for number, (position, size) in base.items() if position <= self.position}
        saved = {number: size for number, size in self.saved.items() if number not in base}
        inputs = [number for number in self.inputs | self.saved.keys() if number in before and number not in staying]
        new = sum(before[number] for number in inputs if base[number][0] == self.position)
        return CallProfile(
            position=self.position,
            base_live_bytes=sum(before.values()) + _OTHER_BYTES,
            saved_bytes=sum(saved.values()),
            cost=sum(operator.cost for operator in reached),
            operators=tuple(operators),
            staying_base_bytes=sum(size for number, size in before.items() if number in staying) + _OTHER_BYTES,
            staying_saved_bytes=sum(size for number, size in saved.items() if number in staying),
            new_input_bytes=new,
            old_input_bytes=sum(before[number] for number in inputs) - new,
        )


@dataclass
class Round:
    """A forward and its backward."""

    calls: list[Call] = field(default_factory=list)
    base: dict[int, tuple[float, int]] = field(default_factory=dict)  # first position and bytes, by storage
    other_cost: float = 0.0
    is_over: bool = False

    def profile(self, small: Collection[int], min_offload_bytes: int) -> StepProfile:
        """Say what each layer keeps and costs."""
        base = dict(self.base)
        for call in self.calls:
            for number in call.saved.keys() & base.keys():  # saved in the layer, and an input of a later one
                base[number] = (min(base[number][0], call.position), base[number][1])
        sizes = {number: size for number, (_, size) in base.items()}
        for call in self.calls:
            sizes.update(call.saved)
            for operator in call.operators:
                sizes.update(operator.storages or {})
        staying = {number for number, size in sizes.items() if number in small or size < min_offload_bytes}
        layers: dict[str, list[CallProfile]] = {}
        for call in self.calls:
            layers.setdefault(call.layer, []).append(call.profile(base, staying))
        return StepProfile(
            layers=tuple(LayerProfile(name, tuple(calls)) for name, calls in layers.items()),
            base_total_bytes=sum(num_bytes for _, num_bytes in base.values()) + _OTHER_BYTES,
            other_cost=self.other_cost,
            staying_base_bytes=sum(size for number, (_, size) in base.items() if number in staying) + _OTHER_BYTES,
            largest_bytes=max((size for number, size in sizes.items() if number not in staying), default=0),
        )


Shapes = tuple[tuple[int, ...], ...]
"""Of each tensor among the arguments of a call: bytes of an element, and sizes."""


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    """Return how large the tensors among arguments are."""
    return tuple((leaf.dtype.itemsize, *_sizes_of(leaf)) for leaf in leaves if isinstance(leaf, Tensor))


def _sizes_of(leaf: Tensor) -> torch.Size:
    return leaf.values().shape if leaf.layout is torch.jagged else leaf.shape  # lengths of many rows do not compare


def covers(one: Shapes, other: Shapes) -> bool:
    """Whether no tensor of ``other`` is larger in any way."""
    return len(one) == len(other) and all(
        len(large) == len(small) and all(a >= b for a, b in zip(large, small, strict=True))
        for large, small in zip(one, other, strict=True)
    )
