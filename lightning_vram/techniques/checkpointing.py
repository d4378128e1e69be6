"""Activation checkpointing (gradient checkpointing, rematerialisation) of chosen layers, on any module.

A checkpointed layer keeps its inputs and runs its forward again when the backward needs what is inside. Of a network
of n equal layers the inputs of n layers stay, and the inside of one at a time; the price is one more forward
(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174). It does not help
where a layer is a single cheap operation: its input is all it keeps anyway.

The layer changes its class instead of being wrapped, so that names, ``state_dict``, copies, pickles,
``torch.compile`` and FSDP2 see the model they know. How it is run: :mod:`~lightning_vram.techniques.recomputed_call`.
"""

import copyreg
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_vram.techniques.key_value_cache import drop_empty_caches
from lightning_vram.techniques.layer_selection import Layer, LayerPattern, LayerSelection, select_layers
from lightning_vram.techniques.module_snapshot import iterate_floating_buffers
from lightning_vram.techniques.recomputed_call import Observation, call_recomputed

_STATE = "_activation_checkpointing"
_TRANSFORMERS_SWITCH = "gradient_checkpointing"  # what gradient_checkpointing_enable() sets

_classes: dict[type[nn.Module], type[nn.Module]] = {}  # checkpointed by original: made once, so that types compare


@dataclass
class _State:
    """What a checkpointed module carries, in its ``__dict__``: without it the module runs as it always did.

    Args:
        spans: Runs of children to checkpoint one by one; empty if the whole module is.
        forward: A ``forward`` that was set on the instance and would hide the class's.
        is_compilable: Whether it may be recomputed in compiled code.
        observations: What was learned about each span, or about the module under ``None``.
    """

    spans: tuple[tuple[int, int], ...]
    forward: Callable[..., Any] | None
    is_compilable: bool
    observations: dict[tuple[int, int] | None, Observation] = field(default_factory=dict)


class CheckpointingHandle:
    """Undoes :func:`apply_activation_checkpointing`.

    Args:
        selection: What is checkpointed.
    """

    def __init__(self, selection: LayerSelection) -> None:
        self.selection = selection
        self._modules: list[nn.Module] = []
        self._disabled: list[nn.Module] = []

    def remove(self) -> None:
        """Give every layer its class back. Calling it again does nothing."""
        while self._modules:
            _restore_module(self._modules.pop())
        while self._disabled:
            vars(self._disabled.pop())[_TRANSFORMERS_SWITCH] = True


def apply_activation_checkpointing(
    model: nn.Module, *, layers: LayerPattern | Sequence[LayerPattern] = "auto", every_n_layers: int = 1
) -> CheckpointingHandle:
    """Let chosen layers of ``model`` recompute their forward in the backward, in place.

    Gradients, random state and buffers are those of the plain model, to the bit. Layers run as usual where no gradient
    is recorded. Gradient checkpointing that transformers had switched on for the same layers is switched off
    meanwhile, so that nothing is recomputed twice.

    Args:
        model: Any module.
        layers: See :func:`~lightning_vram.techniques.layer_selection.select_layers`.
        every_n_layers: Checkpoint the first chosen layer and every n-th after it.

    Returns:
        The undo.

    Raises:
        ValueError: If a pattern matches nothing, ``"auto"`` finds no candidate, or a layer cannot be checkpointed
            (a scripted one; one that is checkpointed already). The model is then as it was.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in range(4)))
        >>> handle = apply_activation_checkpointing(model, every_n_layers=2)
        >>> [layer.name for layer in handle.selection.layers]
        ['0', '2']
        >>> handle.remove()
    """
    handle = CheckpointingHandle(select_layers(model, layers, every_n_layers))
    try:
        for module, spans in _group_by_module(handle.selection.layers).items():
            _swap_class(module, spans)
            handle._modules.append(module)
    except BaseException:
        handle.remove()
        raise
    chosen = set(handle._modules)
    for module in model.modules():
        is_switched_on = vars(module).get(_TRANSFORMERS_SWITCH) is True
        if is_switched_on and not chosen.isdisjoint(_family(model, module)):
            vars(module)[_TRANSFORMERS_SWITCH] = False
            handle._disabled.append(module)
    return handle


class _Checkpointed:
    """Mixed in before the class of a checkpointed module."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep registries and checks that the user's classes hang here from seeing ours."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A class made at run time cannot be found by name, and a file must not need this package: copies and pickles
        # are plain modules.
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        original = _original_class(type(self))
        if rest and isinstance(rest[0], dict) and _STATE in rest[0]:
            state: _State = rest[0][_STATE]
            rest[0] = {name: value for name, value in rest[0].items() if name != _STATE}
            rest[0] |= {"forward": state.forward} if state.forward is not None else {}
        arguments = tuple(original if argument is type(self) else argument for argument in arguments)
        if make is getattr(copyreg, "__newobj__", None) and len(arguments) == 1:
            # pickle insists that __newobj__ makes the class of the very object; its elder does the same work
            make, arguments = copyreg._reconstructor, (original, object, None)  # type: ignore[attr-defined]
        return make, arguments, *rest


def _checkpointed_class(original: type[nn.Module]) -> type[nn.Module]:
    if issubclass(original, _Checkpointed):  # a class that outlived its checkpointing: FSDP2 derived from it
        return original
    if original not in _classes:
        _classes[original] = _make_checkpointed_class(original)
    return _classes[original]


def _make_checkpointed_class(original: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(original.forward)  # transformers and others inspect the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: _State | None = self.__dict__.get(_STATE)
        inherited: Any = super(checkpointed, self)
        plain = inherited.forward if state is None or state.forward is None else state.forward
        if state is None or not torch.is_grad_enabled() or _is_transformed():
            return plain(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _run_compiled(state, self, plain, args, kwargs)
        if state.spans:
            return _run_spans(self, state, *args, **kwargs)  # type: ignore[arg-type]
        arguments = drop_empty_caches(self, (args, kwargs))
        return call_recomputed(self, (self,), plain, arguments, state.observations.setdefault(None, Observation()))

    # The same name, so that printed models and policies that go by class name see no change.
    attributes = {"forward": forward, "__module__": original.__module__, "__qualname__": original.__qualname__}
    metaclass: Any = type(original)
    checkpointed: type[nn.Module] = metaclass(original.__name__, (_Checkpointed, original), attributes)
    return checkpointed


def _run_compiled(
    state: _State, layer: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let the compiler's partitioner recompute: it functionalises what a layer writes, and keeps random numbers."""
    if not state.is_compilable:
        return plain(*args, **kwargs)
    args, kwargs = drop_empty_caches(layer, (args, kwargs))
    if not state.spans:
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)
    (value,) = (*args, *kwargs.values())
    for run, span in _iterate_runs(layer, state.spans):  # type: ignore[arg-type]
        whole = functools.partial(_run_in_turn, run)
        value = whole(value) if span is None else checkpoint(whole, value, use_reentrant=False)
    return value


def _run_spans(body: nn.Sequential, state: _State, input: Any) -> Any:
    """Run a Sequential as its own forward would, each span as one checkpointed layer."""
    value = input
    for run, span in _iterate_runs(body, state.spans):
        whole = functools.partial(_run_in_turn, run)
        if span is None:
            value = whole(value)
        else:
            observation = state.observations.setdefault(span, Observation())
            value = call_recomputed(body, run, whole, ((value,), {}), observation)
    return value


def _iterate_runs(
    body: nn.Sequential, spans: Sequence[tuple[int, int]]
) -> list[tuple[list[nn.Module], tuple[int, int] | None]]:
    """All children in order, in runs that are a span and runs between spans."""
    children = list(body)
    runs: list[tuple[list[nn.Module], tuple[int, int] | None]] = []
    done = 0
    for span in spans:
        runs += [(children[done : span[0]], None), (children[slice(*span)], span)]
        done = span[1]
    return [*runs, (children[done:], None)]


def _run_in_turn(modules: Sequence[nn.Module], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


def _is_transformed() -> bool:
    """Whether ``torch.func`` or a tracer is at work: neither knows the saved-tensor hooks checkpoints are made of."""
    return torch._C._functorch.peek_interpreter_stack() is not None or bool(torch._C._is_tracing())


def _is_compilable(module: nn.Module) -> bool:
    """Whether a compiled recomputation gives the right result.

    A buffer that a layer writes and then reads is saved by the compiler after it was overwritten, under any checkpoint
    (measured: gradients off by 1.1e-3 at a scale of 0.07 after one step). Code that the compiler was told to leave
    alone runs in eager mode without what the eager path does for it.
    """
    members = list(module.modules())
    is_left_alone = any(getattr(type(member).forward, "_torchdynamo_disable", False) for member in members)
    return not is_left_alone and next(iterate_floating_buffers(module), None) is None


def _swap_class(module: nn.Module, spans: tuple[tuple[int, int], ...]) -> None:
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"layer {name} is scripted and cannot be checkpointed. Pass the model before torch.jit.script."
        )
    if _STATE in vars(module):
        raise ValueError(f"layer {name} is checkpointed already. Use one ActivationCheckpointing with several layers.")
    is_compilable = _is_compilable(module)
    try:
        module.__class__ = _checkpointed_class(type(module))
    except TypeError as error:
        raise ValueError(f"layer {name} cannot be checkpointed: {error}.") from None
    vars(module)[_STATE] = _State(spans, vars(module).pop("forward", None), is_compilable)


def _restore_module(module: nn.Module) -> None:
    state: _State = vars(module).pop(_STATE)
    if state.forward is not None:
        vars(module)["forward"] = state.forward
    if type(module).__mro__[1] is _Checkpointed:  # else a class was put on top (FSDP2): without its state ours is idle
        module.__class__ = _original_class(type(module))


def _original_class(kind: type) -> Any:
    return kind.__mro__[kind.__mro__.index(_Checkpointed) + 1]


def _group_by_module(layers: Sequence[Layer]) -> dict[nn.Module, tuple[tuple[int, int], ...]]:
    spans: dict[nn.Module, tuple[tuple[int, int], ...]] = {}
    for layer in layers:
        spans[layer.module] = (*spans.get(layer.module, ()), *([layer.span] if layer.span else []))
    return spans


def _family(model: nn.Module, module: nn.Module) -> set[nn.Module]:
    """A module, what it holds, and what holds it."""
    return {
        *module.modules(),
        *(holder for holder in model.modules() if any(inner is module for inner in holder.modules())),
    }
