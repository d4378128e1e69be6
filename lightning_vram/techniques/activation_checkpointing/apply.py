"""Activation checkpointing (gradient checkpointing, activation recomputation) of chosen layers, on any module.

A checkpointed layer saves its inputs and runs its forward again when the backward needs its activations: of n equal
layers the inputs of n are saved, and the activations of one at a time, for one more forward (Chen et al. 2016,
https://arxiv.org/abs/1604.06174). It does not help where a layer is a single cheap operation. Forward hooks on modules
inside a layer fire in both runs, those on the layer itself once.

The layer changes its class instead of being wrapped, so that names, ``state_dict``, copies, pickles,
``torch.compile`` and FSDP2 see the model they know.
"""

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from typing_extensions import override

from lightning_vram.core.hooks import is_transformed, stepping_aside, watch_saves
from lightning_vram.core.layers import (
    Layer,
    LayerPattern,
    LayerSelection,
    Segments,
    select_layers,
    select_segments,
    thin_out,
)
from lightning_vram.core.operators import operator_work
from lightning_vram.core.patching import Swaps
from lightning_vram.core.ranks import gather_objects
from lightning_vram.core.rollback import iterate_floating_buffers
from lightning_vram.core.tensors.properties import PARAMETER_CLASSES, is_strided, version_counter
from lightning_vram.memory.storages import ByStorage, iterate_storages, iterate_tensors, version_of
from lightning_vram.memory.tracking.operator_listener import StorageSubscriber
from lightning_vram.private_names.dispatcher import is_left_to_python
from lightning_vram.private_names.torch import base_of, is_view, tensors_in
from lightning_vram.techniques.activation_checkpointing import budget_plan
from lightning_vram.techniques.activation_checkpointing.recomputed_call import (
    CallWatch,
    DeterminismCheck,
    Observation,
    Recomputing,
    call_recomputed,
    drop_empty_caches,
)
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy

_STATE = "_activation_checkpointing"
_TRANSFORMERS_SWITCH = "gradient_checkpointing"  # what gradient_checkpointing_enable() sets

# Past the saved-tensor hooks of others, as always. From torch 2.15 on it has to be said: else a warning tells that a
# later version will hand them what is kept. Where nothing is kept it means nothing.
_RESPECT = "respect_saved_tensors_hooks"
_HOOKS: dict[str, Any] = {_RESPECT: False} if _RESPECT in inspect.signature(checkpoint).parameters else {}

_Span = tuple[int, int]


@dataclass
class _Part:
    """A module that is checkpointed, or a run of children of a Sequential."""

    recomputing: Recomputing | None  # how; ``None``: it runs plain
    observation: Observation = field(default_factory=Observation)  # what was learned about it


@dataclass
class _State:
    """State of a checkpointed module, in its ``__dict__``: without it the module runs its own forward."""

    parts: dict[_Span | None, _Part]  # by span of children, or under ``None`` the whole module
    is_compilable: bool  # whether it may be recomputed in compiled code


class CheckpointingHandle(Swaps):
    """Undoes :func:`apply_activation_checkpointing`."""

    def __init__(self, selection: LayerSelection) -> None:
        super().__init__(_STATE)
        self.selection = selection
        self._disabled: list[nn.Module] = []

    def change(self, layer: Layer, recomputing: Recomputing | None) -> None:
        """Recompute ``layer`` as given from its next call on (``None``: plain)."""
        state: _State | None = vars(layer.module).get(_STATE)
        if state is not None:
            state.parts[layer.span].recomputing = recomputing

    def num_saved_results(self) -> int | None:
        """Results of operators that layers kept in their last calls; ``None`` if no call was seen yet."""
        parts = (part for module in self.modules for part in vars(module)[_STATE].parts.values())
        numbers = [part.observation.num_kept for part in parts if part.observation.num_kept is not None]
        return sum(numbers) if numbers else None

    def remove(self) -> None:
        """Give every layer its class back. Calling it again does nothing."""
        super().remove()
        while self._disabled:
            vars(self._disabled.pop())[_TRANSFORMERS_SWITCH] = True


def apply_activation_checkpointing(  # noqa: PLR0913 - the words of the callback
    model: nn.Module,
    *,
    layers: LayerPattern | Sequence[LayerPattern] = "auto",
    every_n_layers: int = 1,
    segments: Segments | None = None,
    skip_last: bool = False,
    save: SavePolicy | None = None,
    determinism_check: DeterminismCheck = "outputs",
) -> CheckpointingHandle:
    """Let chosen layers of ``model`` recompute their forward in the backward, in place.

    Gradients, random state and buffers are those of the plain model, to the bit. Layers run as usual where no gradient
    is recorded. Gradient checkpointing that transformers had switched on for the same layers is switched off
    meanwhile, so that nothing is recomputed twice.

    Args:
        model: Any module.
        layers: See :func:`~lightning_vram.core.layers.select_layers`.
        every_n_layers: Checkpoint the first chosen layer and every n-th after it.
        segments: Cut the sequential bodies among ``layers`` into so many layers: see
            :func:`~lightning_vram.core.layers.select_segments`.
        skip_last: Leave the last layer, or the last segment of each body, plain: the backward wants its inside first.
        save: What a layer keeps besides its inputs.
        determinism_check: How a second run is compared to the first; see
            :class:`~lightning_vram.techniques.activation_checkpointing.recomputed_call.Recomputing`.

    Returns:
        The undo.

    Raises:
        ValueError: If a pattern matches nothing, ``"auto"`` finds no candidate, nothing is left, or a layer cannot be
            checkpointed (a scripted one; one that is checkpointed already). The model is then as it was.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in range(4)))
        >>> handle = apply_activation_checkpointing(model, every_n_layers=2)
        >>> [layer.name for layer in handle.selection.layers]
        ['0', '2']
        >>> handle.remove()
    """
    found = select_segments(model, layers, segments) if segments is not None else select_layers(model, layers)
    handle = CheckpointingHandle(thin_out(found, every_n_layers, skip_last=skip_last))
    with handle.all_or_none():
        parts: dict[nn.Module, dict[_Span | None, _Part]] = {}
        for layer in handle.selection.layers:
            parts.setdefault(layer.module, {})[layer.span] = _Part(Recomputing(layer.title, save, determinism_check))
        for module, chosen in parts.items():
            _swap_class(handle, module, chosen)
    modules = set(handle.modules)
    for module in model.modules():
        if vars(module).get(_TRANSFORMERS_SWITCH) is True:
            family = {*module.modules(), *(holder for holder in model.modules() if module in holder.modules())}
            if not modules.isdisjoint(family):
                vars(module)[_TRANSFORMERS_SWITCH] = False
                handle._disabled.append(module)
    return handle


def _run(module: nn.Module, state: _State, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``module.forward``, which is ``original``."""
    if (torch.compiler.is_compiling() and not state.is_compilable) or not torch.is_grad_enabled() or is_transformed():
        return original(*args, **kwargs)
    if all(part.recomputing is None for part in state.parts.values()):
        return original(*args, **kwargs)
    if None in state.parts:
        args, kwargs = drop_empty_caches(module, (args, kwargs))
        return _run_part(state.parts[None], (module,), original, *args, **kwargs)
    (value,) = (*args, *kwargs.values())  # a Sequential runs as its own forward would, each span as one layer
    for run, part in _iterate_runs(module, state.parts):  # type: ignore[arg-type]
        value = _run_part(part, run, partial(_run_in_order, run), value)
    return value


def _run_part(
    part: _Part | None, modules: Sequence[nn.Module], forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Recompute a call; in compiled code the partitioner does: it functionalises writes, and keeps random numbers."""
    if part is None or part.recomputing is None:
        return forward(*args, **kwargs)
    if not torch.compiler.is_compiling():
        return call_recomputed(modules, forward, (args, kwargs), part.observation, part.recomputing)
    run, save = partial(forward, **kwargs), part.recomputing.save  # past the checkpoint, which has keywords of its own
    if save is None:
        return checkpoint(run, *args, use_reentrant=False)
    # all operators of the policy: ``every_n`` does not count there
    contexts = partial(create_selective_checkpoint_contexts, list(save.resolved))
    return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **_HOOKS)


def _iterate_runs(body: nn.Sequential, parts: Mapping[Any, _Part]) -> list[tuple[list[nn.Module], _Part | None]]:
    """All children in order, in runs that are checkpointed and runs between them."""
    children = list(body)
    runs: list[tuple[list[nn.Module], _Part | None]] = []
    done = 0
    for (start, stop), part in parts.items():
        runs += [(children[done:start], None), (children[start:stop], part)]
        done = stop
    return [*runs, (children[done:], None)]


def _run_in_order(modules: Sequence[nn.Module], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


def _swap_class(handle: Swaps, module: nn.Module, parts: dict[_Span | None, _Part]) -> None:
    name = type(module).__name__
    if _STATE in vars(module):
        raise ValueError(f"layer {name} is checkpointed already. Use one ActivationCheckpointing with several layers.")
    # A buffer that a layer writes and then reads is saved by the compiler after it was overwritten, by any checkpoint
    # (measured: gradients off by 1.1e-3 at a scale of 0.07 after one step). Code that the compiler was told to leave
    # alone runs in eager mode without what the eager path does for it.
    is_left_alone = any(is_left_to_python(getattr(type(member), "forward", None)) for member in module.modules())
    is_compilable = not is_left_alone and next(iterate_floating_buffers(module), None) is None
    try:
        handle.add(module, _State(parts, is_compilable), _run)
    except ValueError as error:
        raise ValueError(f"layer {name} cannot be checkpointed: {error} Choose other layers.") from None


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

    def profile(self, call: "_Call", base: Collection[int]) -> budget_plan.OperatorProfile:
        """A result that is overwritten, or made after the last that is saved, is never kept: it gains nothing."""
        if self.num_saves == call.num_saves or (self.counter is not None and version_of(self.counter) != self.version):
            return budget_plan.OperatorProfile(self.name, 0, is_saved=True, cost=0.0)
        new = {number: size for number, size in (self.storages or {}).items() if number not in base}
        return budget_plan.OperatorProfile(self.name, sum(new.values()), new.keys() <= call.saved.keys(), self.cost)


@dataclass
class _Call:
    layer: str
    position: int
    operators: list[_Operator] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)  # bytes by storage
    inputs: set[int] = field(default_factory=set)  # base storages that its backward needs
    num_saves: int = 0

    def profile(self, base: dict[int, tuple[float, int]]) -> budget_plan.CallProfile:
        """Return what it saves in addition to the storages in ``base``, and costs."""
        before = {number: size for number, (position, size) in base.items() if position <= self.position}
        return budget_plan.CallProfile(
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

    def profile(self, small: Collection[int], min_offload_bytes: int) -> budget_plan.StepProfile:
        base, sizes = dict(self.base), {number: size for number, (_, size) in self.base.items()}
        for call in self.calls:
            for number in call.saved.keys() & base.keys():  # saved in the layer, and an input of a later one
                base[number] = (min(base[number][0], call.position), base[number][1])
            sizes.update(call.saved)
            for operator in call.operators:
                sizes.update(operator.storages or {})
        offloadable = {n: size for n, size in sizes.items() if n not in small and size >= min_offload_bytes}
        return budget_plan.StepProfile(
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
        self._costly = SavePolicy("matmuls").resolved
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

    def profiles(self) -> list[budget_plan.StepProfile]:
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
        if func in self._costly:
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


_MAX_PROFILES = 8


class BudgetedCheckpointing:
    """Makes and applies plans for the layers that a handle checkpoints, so that activations fit a byte budget.

    In an observed step every layer is checkpointed. Under a plan some layers run plain, others save results of costly
    operators. The budget counts what is saved for backward and what one layer at a time recomputes there: no gradients,
    no temporaries inside operators.
    """

    def __init__(
        self,
        model: nn.Module,
        handle: CheckpointingHandle,
        budget_bytes: int,
        determinism_check: DeterminismCheck = "outputs",
        min_offload_bytes: int = 0,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.profiles: deque[budget_plan.StepProfile] = deque(maxlen=_MAX_PROFILES)
        """Of the rounds observed last."""
        self._model = model
        self._handle = handle  # its layers, all of them checkpointed; the caller removes it
        self._check: DeterminismCheck = determinism_check
        self._min_offload_bytes = min_offload_bytes

    @contextmanager
    def observing(self, inputs: Any = None) -> Iterator[None]:
        """Run one training step inside, with every layer checkpointed; :meth:`plan` works from what it was."""
        observer = StepObserver(self._model, inputs, self._min_offload_bytes)
        for layer in self._handle.selection.layers:
            self._handle.change(layer, replace(self._full(layer), watch=observer.watch(layer.name)))
        try:
            with observer.observing():
                yield
            self.profiles += observer.profiles()
        finally:
            for layer in self._handle.selection.layers:
                self._handle.change(layer, self._full(layer))

    def plan(self, offload_bytes: int = 0) -> budget_plan.CheckpointPlan | None:
        """Make a plan for the largest round, or raise ``BudgetError``; ``None`` if no layer was observed.

        A step with several backwards has several rounds, and batches have several shapes: if one of the others does
        not fit the plan, every layer is checkpointed.
        """
        if not self.profiles:
            return None
        for profile in self.profiles:
            budget_plan.find_minimum(profile, self.budget_bytes, offload_bytes)
        largest = max(self.profiles, key=lambda profile: budget_plan.predict_peak(profile, profile.decide(None)))
        plan = budget_plan.solve(largest, self.budget_bytes, offload_bytes)
        peaks = (budget_plan.predict_peak(profile, plan.decisions, plan.offloaded_bytes) for profile in self.profiles)
        if max(peaks) <= self.budget_bytes:
            return plan
        return budget_plan.plan_nothing(largest, self.budget_bytes, offload_bytes)

    def apply(self, decisions: budget_plan.Decisions) -> None:
        """Apply decisions from the next call of each layer on; layers without a decision stay checkpointed."""
        for layer in self._handle.selection.layers:
            full, decision = self._full(layer), decisions.get(layer.name, budget_plan.NOTHING)
            decided = replace(full, save=SavePolicy("matmuls", numbers=decision)) if decision else full
            self._handle.change(layer, None if decision is None else decided)

    def _full(self, layer: Layer) -> Recomputing:
        return Recomputing(layer.title, None, self._check)


def share_largest(make_plan: Callable[[], budget_plan.CheckpointPlan | None]) -> budget_plan.CheckpointPlan | None:
    """Make a plan on every rank, and return that of the rank which needs most; ``None`` if none could be made.

    A collective, where there are several ranks. Layers may communicate while they run (SyncBatchNorm, FSDP), so all
    ranks must recompute the same ones, and all of them must raise an error that one has.
    """
    found: budget_plan.CheckpointPlan | str | None
    try:
        found = make_plan()
    except ValueError as error:
        found = str(error)
    everybodys = gather_objects(found)
    for plan in everybodys:
        if isinstance(plan, str):
            raise ValueError(plan)
    plans = [plan for plan in everybodys if isinstance(plan, budget_plan.CheckpointPlan)]
    return max(plans, key=lambda plan: plan.plain_peak_bytes, default=None)
