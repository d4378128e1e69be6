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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_vram.core.hooks import is_transformed
from lightning_vram.core.layers import (
    Layer,
    LayerPattern,
    LayerSelection,
    Segments,
    select_layers,
    select_segments,
    thin_out,
)
from lightning_vram.core.patching import Swaps
from lightning_vram.core.ranks import gather_objects
from lightning_vram.core.rollback import iterate_floating_buffers
from lightning_vram.private_names.dispatcher import is_left_to_python
from lightning_vram.techniques.activation_checkpointing.budget_observer import StepObserver
from lightning_vram.techniques.activation_checkpointing.budget_plan import (
    NOTHING,
    CheckpointPlan,
    Decisions,
    StepProfile,
    find_minimum,
    plan_nothing,
    predict_peak,
    solve,
)
from lightning_vram.techniques.activation_checkpointing.recomputed_call import (
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
            part = _Part(Recomputing(layer.title, save, determinism_check))
            parts.setdefault(layer.module, {})[layer.span] = part
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
    if not torch.is_grad_enabled():
        return original(*args, **kwargs)
    if torch.compiler.is_compiling():
        return original(*args, **kwargs) if is_transformed() else _run_compiled(state, module, original, args, kwargs)
    if all(part.recomputing is None for part in state.parts.values()) or is_transformed():
        return original(*args, **kwargs)
    if None not in state.parts:
        return _run_spans(module, state, *args, **kwargs)  # type: ignore[arg-type]
    part = state.parts[None]
    assert part.recomputing is not None
    arguments = drop_empty_caches(module, (args, kwargs))
    return call_recomputed((module,), original, arguments, part.observation, part.recomputing)


def _run_compiled(
    state: _State, layer: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let the compiler's partitioner recompute: it functionalises what a layer writes, and keeps random numbers."""
    if not state.is_compilable:
        return original(*args, **kwargs)
    args, kwargs = drop_empty_caches(layer, (args, kwargs))
    if None in state.parts:
        return _run_part_compiled(state.parts[None], original, *args, **kwargs)
    (value,) = (*args, *kwargs.values())
    for run, part in _iterate_runs(layer, state.parts):  # type: ignore[arg-type]
        value = _run_part_compiled(part, partial(_run_in_order, run), value)
    return value


def _run_part_compiled(part: _Part | None, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if part is None or part.recomputing is None:
        return forward(*args, **kwargs)
    run, save = partial(forward, **kwargs), part.recomputing.save  # past the checkpoint, which has keywords of its own
    if save is None:
        return checkpoint(run, *args, use_reentrant=False)
    # all operators of the policy: ``every_n`` does not count there
    contexts = partial(create_selective_checkpoint_contexts, list(save.resolved))
    return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **_HOOKS)


def _run_spans(body: nn.Sequential, state: _State, /, input: Any) -> Any:
    """Run a Sequential as its own forward would, each span as one checkpointed layer."""
    value = input
    for run, part in _iterate_runs(body, state.parts):
        if part is None or part.recomputing is None:
            value = _run_in_order(run, value)
        else:
            whole = partial(_run_in_order, run)
            value = call_recomputed(run, whole, ((value,), {}), part.observation, part.recomputing)
    return value


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


def _is_compilable(module: nn.Module) -> bool:
    """Whether a compiled recomputation gives the right result.

    A buffer that a layer writes and then reads is saved by the compiler after it was overwritten, under any checkpoint
    (measured: gradients off by 1.1e-3 at a scale of 0.07 after one step). Code that the compiler was told to leave
    alone runs in eager mode without what the eager path does for it.
    """
    is_left_alone = any(is_left_to_python(type(member).forward) for member in module.modules())
    return not is_left_alone and next(iterate_floating_buffers(module), None) is None


def _swap_class(handle: Swaps, module: nn.Module, parts: dict[_Span | None, _Part]) -> None:
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"layer {name} is scripted and cannot be checkpointed. Pass the model before torch.jit.script."
        )
    if _STATE in vars(module):
        raise ValueError(f"layer {name} is checkpointed already. Use one ActivationCheckpointing with several layers.")
    try:
        handle.add(module, _State(parts, _is_compilable(module)), _run)
    except ValueError as error:
        raise ValueError(f"layer {name} cannot be checkpointed: {error}") from None


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
        self.profiles: deque[StepProfile] = deque(maxlen=_MAX_PROFILES)
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

    def plan(self, offload_bytes: int = 0) -> CheckpointPlan | None:
        """Make a plan for the largest round, or raise ``BudgetError``; ``None`` if no layer was observed.

        A step with several backwards has several rounds, and batches have several shapes: if one of the others does
        not fit the plan, every layer is checkpointed.
        """
        if not self.profiles:
            return None
        for profile in self.profiles:
            find_minimum(profile, self.budget_bytes, offload_bytes)
        largest = max(self.profiles, key=lambda profile: predict_peak(profile, profile.decide(None)))
        plan = solve(largest, self.budget_bytes, offload_bytes)
        peaks = (predict_peak(profile, plan.decisions, plan.offloaded_bytes) for profile in self.profiles)
        if max(peaks) <= self.budget_bytes:
            return plan
        return plan_nothing(largest, self.budget_bytes, offload_bytes)

    def apply(self, decisions: Decisions) -> None:
        """Apply decisions from the next call of each layer on; layers without a decision stay checkpointed."""
        for layer in self._handle.selection.layers:
            full, decision = self._full(layer), decisions.get(layer.name, NOTHING)
            decided = replace(full, save=SavePolicy("matmuls", numbers=decision)) if decision else full
            self._handle.change(layer, None if decision is None else decided)

    def _full(self, layer: Layer) -> Recomputing:
        return Recomputing(layer.title, None, self._check)


def share_largest(make_plan: Callable[[], CheckpointPlan | None]) -> CheckpointPlan | None:
    """Make a plan on every rank, and return that of the rank which needs most; ``None`` if none could be made.

    A collective, where there are several ranks. Layers may communicate while they run (SyncBatchNorm, FSDP), so all
    ranks must recompute the same ones, and all of them must raise an error that one has.
    """
    found: CheckpointPlan | str | None
    try:
        found = make_plan()
    except ValueError as error:
        found = str(error)
    everybodys = gather_objects(found)
    for plan in everybodys:
        if isinstance(plan, str):
            raise ValueError(plan)
    plans = [plan for plan in everybodys if isinstance(plan, CheckpointPlan)]
    return max(plans, key=lambda plan: plan.plain_peak_bytes, default=None)
