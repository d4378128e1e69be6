"""Observe a step: what each layer saves, allocates and computes, as plain data for a plan."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.core.hooks import stepping_aside, watch_saves
from lightning_vram.core.operators import operator_work
from lightning_vram.core.tensors.properties import PARAMETER_CLASSES, is_strided, version_counter
from lightning_vram.memory.storages import ByStorage, iterate_storages, iterate_tensors, version_of
from lightning_vram.memory.tracking.operator_listener import StorageSubscriber
from lightning_vram.private_names.torch import base_of, is_view, tensors_in
from lightning_vram.techniques.activation_checkpointing.budget_plan import CallProfile, OperatorProfile, StepProfile
from lightning_vram.techniques.activation_checkpointing.recomputed_call import CallWatch
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy

_OTHER_BYTES = 8192  # the loss, its gradient, what is logged, samples for comparison: alive, and saved by nobody


@dataclass
class _Operator:
    """One operator in one call. ``storages`` and ``counter`` are there for costly ones only."""

    name: str
    cost: float
    num_saves: int  # of the call, before it ran
    storages: dict[int, int] | None = None  # bytes by number
    counter: Tensor | None = None
    version: int = 0

    def profile(self, call: "_Call", base: Collection[int]) -> OperatorProfile:
        """A result that is overwritten, or made after the last that is saved, is never kept: it gains nothing."""
        is_overwritten = self.counter is not None and version_of(self.counter) != self.version
        if is_overwritten or self.num_saves == call.num_saves:
            return OperatorProfile(self.name, 0, is_saved=True, cost=0.0)
        new = {number: size for number, size in (self.storages or {}).items() if number not in base}
        return OperatorProfile(self.name, sum(new.values()), new.keys() <= call.saved.keys(), self.cost)


@dataclass
class _Call:
    layer: str
    position: int
    operators: list[_Operator] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)  # bytes by storage
    inputs: set[int] = field(default_factory=set)  # base storages that its backward needs
    num_saves: int = 0

    def profile(self, base: dict[int, tuple[float, int]]) -> CallProfile:
        """Return what it saves in addition to the storages in ``base``, and costs."""
        before = {number: size for number, (position, size) in base.items() if position <= self.position}
        return CallProfile(
            self.layer,
            base_live_bytes=sum(before.values()) + _OTHER_BYTES,
            saved_bytes=sum(size for number, size in self.saved.items() if number not in base),
            cost=sum(one.cost for one in self.operators if one.num_saves < self.num_saves),  # a second run ends there
            operators=tuple(one.profile(self, base.keys()) for one in self.operators if one.storages is not None),
            input_bytes=sum(before[number] for number in self.inputs | self.saved.keys() if number in before),
        )


@dataclass
class _Round:
    calls: list[_Call] = field(default_factory=list)
    base: dict[int, tuple[float, int]] = field(default_factory=dict)  # first position and bytes, by storage
    other_cost: float = 0.0
    is_over: bool = False

    def profile(self, small: Collection[int], min_offload_bytes: int) -> StepProfile:
        base, sizes = dict(self.base), {number: size for number, (_, size) in self.base.items()}
        for call in self.calls:
            for number in call.saved.keys() & base.keys():  # saved in the layer, and an input of a later one
                base[number] = (min(base[number][0], call.position), base[number][1])
            sizes.update(call.saved)
            for operator in call.operators:
                sizes.update(operator.storages or {})
        offloadable = {n: size for n, size in sizes.items() if n not in small and size >= min_offload_bytes}
        return StepProfile(
            calls=tuple(call.profile(base) for call in self.calls),
            base_total_bytes=sum(size for _, size in base.values()) + _OTHER_BYTES,
            other_cost=self.other_cost,
            staying_bytes=sum(sizes.values()) - sum(offloadable.values()) + _OTHER_BYTES,
            largest_bytes=max(offloadable.values(), default=0),
        )


class StepObserver(StorageSubscriber):
    """Observes a real step (or one on fake tensors) in which every layer is checkpointed: what each saves and costs."""

    def __init__(self, model: nn.Module, inputs: Any = None, min_offload_bytes: int = 0) -> None:
        super().__init__(ByStorage())  # of their numbers
        self._min_offload_bytes = min_offload_bytes
        self._births: list[_Call | None] = []  # of each number: the call that it was made in
        self._small: set[int] = set()  # storages of which a smaller part was saved
        self._costly = SavePolicy("matmuls")
        self._rounds = [_Round()]
        self._call: _Call | None = None
        self._is_inside = False
        constants = (value for module in model.modules() for value in vars(module).values() if type(value) is Tensor)
        self._held = [*model.parameters(), *model.buffers(), *constants, *iterate_tensors(inputs)]  # keep their numbers
        self._lasting = {number for tensor in self._held for number in self._number(tensor)}

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Run one training step inside."""
        hooks = watch_saves(self._on_save)
        with hooks, stepping_aside(hooks, self), self:
            yield
        self._held.clear()

    def watch(self, layer: str) -> CallWatch:
        """Return what is to be told about the calls of ``layer``."""
        return CallWatch(partial(self._call_of, layer), self._inside, self._end_round)

    def profiles(self) -> list[StepProfile]:
        """Return what was seen, one for each forward with a backward of its own; those without a layer left out."""
        return [round.profile(self._small, self._min_offload_bytes) for round in self._rounds if round.calls]

    @contextmanager
    def _call_of(self, layer: str, leaves: Sequence[Any]) -> Iterator[None]:
        """One call of ``layer`` with these arguments, from before its inputs are saved to after its outputs are."""
        if self._rounds[-1].is_over:
            self._rounds.append(_Round())
        calls, outer = self._rounds[-1].calls, self._call
        self._call = _Call(layer, len(calls))
        calls.append(self._call)
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        for number, num_bytes in chain.from_iterable(self._number(tensor).items() for tensor in tensors):
            self._add_to_base(number, num_bytes, self._call.position)
            self._call.inputs.add(number)
        try:
            yield
        finally:
            self._call = outer

    @contextmanager
    def _inside(self) -> Iterator[None]:
        was_inside, self._is_inside = self._is_inside, True
        hooks = watch_saves(self._on_save)
        try:
            with hooks, stepping_aside(hooks):
                yield
        finally:
            self._is_inside = was_inside

    def _end_round(self) -> None:
        self._rounds[-1].is_over = True

    def _on_save(self, tensor: Tensor) -> None:
        base = base_of(tensor) if type(tensor) is Tensor and is_view(tensor) else tensor
        if type(base) in PARAMETER_CLASSES:
            return
        call = self._call if self._is_inside else None
        numbered = self._number(tensor)
        if self._min_offload_bytes and not self._can_offload(tensor):
            self._small.update(numbered)
        # Outside of all layers: its backward comes before that of the calls so far.
        position = self._call.position if self._call is not None else len(self._rounds[-1].calls) - 0.5
        for number, num_bytes in numbered.items():
            if call is None or self._births[number] is not call:  # made before or outside of this call
                self._add_to_base(number, num_bytes, position)
            elif number not in self._lasting:
                call.saved[number] = num_bytes
        if call is not None:
            call.num_saves += 1

    def _can_offload(self, tensor: Tensor) -> bool:
        """Whether offloading sends what is saved here: most of a storage, or a large part of one."""
        if not is_strided(tensor):
            return False
        length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = length * tensor.dtype.itemsize
        return num_bytes >= self._min_offload_bytes or 2 * num_bytes >= tensor.untyped_storage().nbytes()

    @override
    def on_storage(self, func: Any, storage: torch.UntypedStorage, device: torch.device) -> None:
        self.known.note_storage(storage, len(self._births))
        self._births.append(self._call if self._is_inside else None)

    @override
    def after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        super().after(func, args, kwargs, result)
        cost = operator_work(func, args, kwargs or {}, result).cost
        if self._call is None or not self._is_inside:
            self._rounds[-1].other_cost += cost
            return
        operator = _Operator(str(func).rpartition(".")[0] or str(func), cost, self._call.num_saves)
        if self._costly.concerns(func):
            tensors = list(tensors_in(result))
            operator.storages = dict(entry for tensor in tensors for entry in self._number(tensor).items())
            if tensors and type(tensors[0]) is Tensor and is_strided(tensors[0]):
                operator.counter, operator.version = version_counter(tensors[0]), version_of(tensors[0])
        self._call.operators.append(operator)

    def _number(self, tensor: Tensor) -> dict[int, int]:
        """Return bytes by number of the storages of ``tensor``; unknown ones are made now: compiled code makes some."""
        found = {}
        for storage, device in iterate_storages(tensor):
            number = self.known.find_storage(storage)
            if number is None:
                number = len(self._births)
                self.on_storage(None, storage, device)
            found[number] = int(storage.nbytes())
        return found

    def _add_to_base(self, number: int, num_bytes: int, position: float) -> None:
        if number not in self._lasting:
            base = self._rounds[-1].base
            first, _ = base.get(number, (position, 0))
            base[number] = (min(position, first), num_bytes)
