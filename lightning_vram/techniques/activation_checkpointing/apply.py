"""Activation checkpointing (gradient checkpointing, activation recomputation) of chosen layers, on any module.

A checkpointed layer saves its inputs and runs its forward again when the backward needs its activations: of n equal
layers the inputs of n are saved, and the activations of one at a time, for one more forward (Chen et al. 2016,
https://arxiv.org/abs/1604.06174). It does not help where a layer is a single cheap operation. Forward hooks on modules
inside a layer fire in both runs, those on the layer itself once.

The layer changes its class instead of being wrapped, so that names, ``state_dict``, copies, pickles,
``torch.compile`` and FSDP2 see the model they know.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

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
from lightning_vram.core.rollback import iterate_floating_buffers
from lightning_vram.private_names.dispatcher import is_left_to_python
from lightning_vram.techniques.activation_checkpointing.recomputed_call import (
    DeterminismCheck,
    Observation,
    Recomputing,
    call_recomputed,
    compiled_checkpoint,
    drop_empty_caches,
)
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_checkpointing.saved_arguments import Arguments

_STATE = "_activation_checkpointing"
_TRANSFORMERS_SWITCH = "gradient_checkpointing"  # what gradient_checkpointing_enable() sets

_Span = tuple[int, int]
Guard = Callable[[Recomputing | None, Arguments], Recomputing | None]
"""Gets how a layer is recomputed (``None``: it is plain) and the arguments of a call; returns how this call is."""


@dataclass
class _State:
    """State of a checkpointed module, in its ``__dict__``: without it the module runs its own forward."""

    spans: tuple[_Span, ...]  # runs of children to checkpoint one by one; empty if the whole module is
    is_compilable: bool  # whether it may be recomputed in compiled code
    # how, by span, or under ``None`` for the module; what is absent runs plain
    recomputing: dict[_Span | None, Recomputing]
    # who may decide otherwise for a call, by its arguments
    guards: dict[_Span | None, Guard] = field(default_factory=dict)
    observations: dict[_Span | None, Observation] = field(default_factory=dict)  # what was learned about each

    def observation(self, span: _Span | None) -> Observation:
        return self.observations.setdefault(span, Observation())

    def choose(self, span: _Span | None, arguments: Arguments) -> Recomputing | None:
        recomputing, guard = self.recomputing.get(span), self.guards.get(span)
        return recomputing if guard is None else guard(recomputing, arguments)


class CheckpointingHandle(Swaps):
    """Undoes :func:`apply_activation_checkpointing`."""

    def __init__(self, selection: LayerSelection) -> None:
        super().__init__(_STATE)
        self.selection = selection
        self._disabled: list[nn.Module] = []

    def change(self, layer: Layer, recomputing: Recomputing | None, guard: Guard | None = None) -> None:
        """Recompute ``layer`` as given from its next call on (``None``: plain), unless ``guard`` decides otherwise."""
        state: _State | None = vars(layer.module).get(_STATE)
        if state is None:
            return
        for entries, entry in ((state.recomputing, recomputing), (state.guards, guard)):
            if entry is None:
                entries.pop(layer.span, None)
            else:
                entries[layer.span] = entry  # type: ignore[assignment]

    def num_saved_results(self) -> int | None:
        """Results of operators that layers kept in their last calls; ``None`` if no call was seen yet."""
        observations = [o for module in self.modules for o in vars(module)[_STATE].observations.values()]
        numbers = [observation.num_kept for observation in observations if observation.num_kept is not None]
        return sum(numbers) if numbers else None

    def leave_to_compiler(self) -> None:
        """Let layers run plain in compiled code, whose partitioner decides what it recomputes."""
        for module in self.modules:
            vars(module)[_STATE].is_compilable = False

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
        by_module: dict[nn.Module, dict[_Span | None, Recomputing]] = {}
        for layer in handle.selection.layers:
            recomputing = Recomputing(layer.title, save, determinism_check)
            by_module.setdefault(layer.module, {})[layer.span] = recomputing
        for module, chosen in by_module.items():
            _swap_class(handle, module, chosen)
    modules = set(handle.modules)
    for module in model.modules():
        is_switched_on = vars(module).get(_TRANSFORMERS_SWITCH) is True
        if is_switched_on and not modules.isdisjoint(_family(model, module)):
            vars(module)[_TRANSFORMERS_SWITCH] = False
            handle._disabled.append(module)
    return handle


def _run(module: nn.Module, state: _State, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``module.forward``, which is ``original``."""
    if not torch.is_grad_enabled() or is_transformed():
        return original(*args, **kwargs)
    if torch.compiler.is_compiling():
        return _run_compiled(state, module, original, args, kwargs)
    if state.spans:
        return _run_spans(module, state, *args, **kwargs)  # type: ignore[arg-type]
    recomputing = state.choose(None, (args, kwargs))
    if recomputing is None:
        return original(*args, **kwargs)
    arguments = drop_empty_caches(module, (args, kwargs))
    return call_recomputed((module,), original, arguments, state.observation(None), recomputing)


def _run_compiled(
    state: _State, layer: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let the compiler's partitioner recompute: it functionalises what a layer writes, and keeps random numbers."""
    if not state.is_compilable or not state.recomputing:
        return original(*args, **kwargs)
    args, kwargs = drop_empty_caches(layer, (args, kwargs))
    if not state.spans:
        return compiled_checkpoint(state.recomputing[None].save, original, *args, **kwargs)
    (value,) = (*args, *kwargs.values())
    for run, span in _iterate_runs(layer, state.spans):  # type: ignore[arg-type]
        whole = functools.partial(_run_in_order, run)
        is_plain = span is None or span not in state.recomputing
        value = whole(value) if is_plain else compiled_checkpoint(state.recomputing[span].save, whole, value)
    return value


def _run_spans(body: nn.Sequential, state: _State, /, input: Any) -> Any:
    """Run a Sequential as its own forward would, each span as one checkpointed layer."""
    value = input
    for run, span in _iterate_runs(body, state.spans):
        whole = functools.partial(_run_in_order, run)
        recomputing = state.choose(span, ((value,), {})) if span is not None else None
        if recomputing is None:
            value = whole(value)
        else:
            value = call_recomputed(run, whole, ((value,), {}), state.observation(span), recomputing)
    return value


def _iterate_runs(body: nn.Sequential, spans: Sequence[_Span]) -> list[tuple[list[nn.Module], _Span | None]]:
    """All children in order, in runs that are a span and runs between spans."""
    children = list(body)
    runs: list[tuple[list[nn.Module], _Span | None]] = []
    done = 0
    for span in spans:
        runs += [(children[done : span[0]], None), (children[slice(*span)], span)]
        done = span[1]
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


def _swap_class(handle: Swaps, module: nn.Module, recomputing: dict[_Span | None, Recomputing]) -> None:
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"layer {name} is scripted and cannot be checkpointed. Pass the model before torch.jit.script."
        )
    if _STATE in vars(module):
        raise ValueError(f"layer {name} is checkpointed already. Use one ActivationCheckpointing with several layers.")
    spans = tuple(span for span in recomputing if span is not None)
    try:
        handle.add(module, _State(spans, _is_compilable(module), recomputing), _run)
    except ValueError as error:
        raise ValueError(f"layer {name} cannot be checkpointed: {error}") from None


def _family(model: nn.Module, module: nn.Module) -> set[nn.Module]:
    """A module, what it holds, and what holds it."""
    return {*module.modules(), *(holder for holder in model.modules() if module in holder.modules())}
