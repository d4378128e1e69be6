"""Activation checkpointing (gradient checkpointing, rematerialisation) of chosen layers, on any module.

A checkpointed layer keeps its inputs and runs its forward again when the backward needs what is inside. Of a network
of n equal layers the inputs of n layers stay, and the inside of one at a time; the price is one more forward
(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174). It does not help
where a layer is a single cheap operation: its input is all it keeps anyway.

The work is done by :func:`torch.utils.checkpoint.checkpoint` (non-reentrant). What is ours: the layer changes its
class instead of being wrapped, so that names, ``state_dict``, copies, pickles, ``torch.compile`` and FSDP2 see the
model they know; buffers move once per step; and inputs are handed over such that the random state of their device is
kept and the check for overwritten tensors holds also for those passed by keyword.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_vram.memory.module_scope import module_scope
from lightning_vram.techniques.buffer_shield import BufferShield, has_buffers
from lightning_vram.techniques.key_value_cache import drop_empty_caches
from lightning_vram.techniques.layer_selection import Layer, LayerPattern, LayerSelection, select_layers

_STATE = "_activation_checkpointing"
_TRANSFORMERS_SWITCH = "gradient_checkpointing"  # what gradient_checkpointing_enable() sets

_classes: dict[type[nn.Module], type[nn.Module]] = {}  # checkpointed by original: made once, so that types compare


@dataclass
class _State:
    """What a checkpointed module carries, in its ``__dict__``: without it the module runs as it always did.

    Args:
        spans: Runs of children to checkpoint one by one; empty if the whole module is.
        forward: A ``forward`` that was set on the instance and would hide the class's.
    """

    spans: tuple[tuple[int, int], ...]
    forward: Callable[..., Any] | None


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

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A class made at run time cannot be found by name: copies and pickles are made of the original class.
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        original = _original_class(type(self))
        swapped = tuple(original if argument is type(self) else argument for argument in arguments)
        return (_rebuild, (make, swapped), *rest)


def _rebuild(make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    module = make(*arguments)
    module.__class__ = _checkpointed_class(type(module))
    return module


def _checkpointed_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _classes:
        _classes[original] = _make_checkpointed_class(original)
    return _classes[original]


def _make_checkpointed_class(original: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(original.forward)  # transformers and others inspect the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: _State | None = self.__dict__.get(_STATE)
        plain = state.forward if state is not None and state.forward is not None else original.forward.__get__(self)
        if state is None or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if not state.spans:
            return _run_checkpointed(self, (self,), plain, args, kwargs)
        return _run_spans(self, state.spans, *args)  # type: ignore[arg-type]

    # The same name, so that printed models and policies that go by class name see no change.
    attributes = {"forward": forward, "__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (_Checkpointed, original), attributes)


def _run_spans(body: nn.Sequential, spans: Sequence[tuple[int, int]], value: Any) -> Any:
    """Run a Sequential as its own forward would, each span as one checkpointed layer."""
    children = list(body)
    done = 0
    for start, stop in (*spans, (len(children), len(children))):
        for child in children[done:start]:
            value = child(value)
        run = children[start:stop]
        if run:
            value = _run_checkpointed(body, run, functools.partial(_run_in_turn, run), (value,), {})
        done = stop
    return value


def _run_in_turn(modules: Sequence[nn.Module], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


def _run_checkpointed(
    layer: nn.Module,
    modules: Sequence[nn.Module],
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    args, kwargs = drop_empty_caches(layer, (args, kwargs))
    if torch.compiler.is_compiling():
        # The compiler functionalises buffers and hands the choice to its partitioner: no second run, no shield.
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    shield = BufferShield(modules) if has_buffers(modules) else None
    first_call = [(args, kwargs)]  # the caller's own containers: a layer may append to a list it was given

    def run(*leaves: Any) -> Any:
        if first_call:
            args, kwargs = first_call.pop()
            output = forward(*args, **kwargs)
            if shield is not None:
                shield.keep_changed()
            return output
        args, kwargs = tree_unflatten(list(leaves[: structure.num_leaves]), structure)
        with module_scope(layer):
            return forward(*args, **kwargs)

    del args, kwargs
    return checkpoint(
        run,
        *leaves,
        *_device_witness(modules, leaves),
        use_reentrant=False,
        context_fn=noop_context_fn if shield is None else lambda: (nullcontext(), shield),
    )


def _device_witness(modules: Sequence[nn.Module], leaves: Sequence[Any]) -> tuple[Tensor, ...]:
    """An empty tensor on the layer's device, where no argument lies there.

    The checkpoint keeps the random state of the devices of its tensor arguments: a layer that gets its tensors inside
    an object of the user's would draw another dropout mask the second time.
    """
    parameter = next((p for module in modules for p in module.parameters()), None)
    if parameter is None or parameter.device.type in ("cpu", "meta"):
        return ()
    if any(isinstance(leaf, Tensor) and leaf.device == parameter.device for leaf in leaves):
        return ()
    return (torch.empty(0, device=parameter.device),)


def _swap_class(module: nn.Module, spans: tuple[tuple[int, int], ...]) -> None:
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"layer {name} is scripted and cannot be checkpointed. Pass the model before torch.jit.script."
        )
    if _STATE in vars(module):
        raise ValueError(f"layer {name} is checkpointed already. Use one ActivationCheckpointing with several layers.")
    checkpointed = _checkpointed_class(type(module))
    try:
        module.__class__ = checkpointed
    except TypeError as error:
        raise ValueError(f"layer {name} cannot be checkpointed: {error}.") from None
    vars(module)[_STATE] = _State(spans, vars(module).pop("forward", None))


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
