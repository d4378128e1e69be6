"""Run modules that treat tokens alone (MLPs, norms) some tokens at a time, forward and backward.

The intermediates of an MLP are several times its input. In tiles only its input and result are whole: each tile runs in
the forward without gradients, and again in the backward (TiledMLP of ALST, https://arxiv.org/abs/2506.13996).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_vram.core.hooks import is_in_backward, is_in_selective_checkpoint, is_transformed
from lightning_vram.core.layers import LayerPattern, has_no_forward, name_layers, select_layers
from lightning_vram.core.patching import Swaps
from lightning_vram.core.recomputed_saves import SavedSamples, is_due
from lightning_vram.core.rollback import ForwardFacts, ForwardState
from lightning_vram.private_names.torch import (
    SEE_INPUT,
    BatchNormBase,
    InstanceNormBase,
    has_hooks,
    is_parametrization_cached,
)
from lightning_vram.techniques.token_tiling.proof import have_values, prove
from lightning_vram.techniques.token_tiling.tiled_call import Body, CutCall, TiledCall, cut_call, is_inside

_KEY = "_token_tiling"
_MIXING = (BatchNormBase, InstanceNormBase, nn.MultiheadAttention, nn.RNNBase)

_SETTINGS = frozenset((bool, int, str, type(None)))
_MAX_VERDICTS = 32
"""A proof takes several runs: for further settings, such as a counter, a module runs plain."""
_in_estimates: dict[Any, tuple[bool, str]] = {}

Refuse = Callable[[str, str], None]
"""Gets the name of a layer that was named and cannot run in tiles, and why; raises."""


@dataclass
class _State:
    name: str
    tile: int | Literal["auto"]
    refuse: Refuse | None
    verdicts: dict[Any, tuple[bool, str]] = field(default_factory=dict)  # by the kind of a call, and settings
    learned: ForwardFacts = field(default_factory=ForwardFacts)
    num_calls: Counter[bool] = field(default_factory=Counter)  # with gradients; in a backward, of a checkpoint, or not


class TilingHandle(Swaps):
    """Undoes :func:`apply_token_tiling`."""

    def __init__(self) -> None:
        super().__init__(_KEY)

    def verdicts(self) -> dict[str, tuple[bool, str]]:
        """Whether each module that was asked runs in tiles, and why not, or how exactly."""
        states = [vars(module)[_KEY] for module in self.modules]
        return {state.name: verdict for state in states for verdict in state.verdicts.values()}


def apply_token_tiling(
    model: nn.Module,
    layers: LayerPattern | Sequence[LayerPattern] = "auto",
    tile: int | Literal["auto"] = "auto",  # tokens of each sequence at a time; see ``CutCall.tile``
    *,
    refuse: Refuse | None = None,  # called in the first call of a layer that was named and cannot run in tiles
) -> TilingHandle:
    """Let modules of ``model`` that treat tokens alone run in tiles.

    ``"auto"`` takes the outermost modules that are proven to treat tokens alone and compute in several operations.
    """
    if isinstance(layers, str) and layers == "auto":
        first_names: dict[nn.Module, str] = {}
        for name, module in name_layers(model).items():
            first_names.setdefault(module, name)
        chosen = {name: module for module, name in first_names.items() if _is_candidate(module)}
        refuse = None
    else:
        chosen = {layer.name: layer.module for layer in select_layers(model, layers).layers}
    handle = TilingHandle()
    with handle.all_or_none():
        for name, module in chosen.items():
            handle.add(module, _State(name, tile, refuse), _run)
    return handle


def _is_candidate(module: nn.Module) -> bool:
    is_composite = any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")
    has_weights = next(module.parameters(), None) is not None  # else a metric, a loss, a part of what is asked itself
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return is_composite and has_weights and not has_no_forward(module) and not is_scripted


def _run(module: nn.Module, state: _State, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or is_inside() or is_transformed() or is_in_selective_checkpoint():
        return original(*args, **kwargs)
    if is_parametrization_cached():  # in parametrize.cached(): tiles would share weights
        return original(*args, **kwargs)
    found = cut_call((args, kwargs))
    if isinstance(found, str):
        return _leave(state, found, original, args, kwargs)
    call, tensors = found
    tile = call.tile(state.tile)
    if tile >= call.num_tokens:
        return original(*args, **kwargs)
    body = Body(module, original)
    is_alone, reason = _ask(module, state, body, call, tensors)
    if not is_alone:
        return _leave(state, reason, original, args, kwargs)
    tiled = TiledCall(body, call, tile, state.name)
    if torch.is_grad_enabled():
        state.num_calls[is_in_backward()] += 1
        tiled.state = ForwardState((module,), state.learned, (one.device for one in tensors))
        tiled.samples = SavedSamples(module.buffers()) if is_due(state.num_calls[is_in_backward()]) else None
    del args, kwargs, found
    return tiled(tensors)


def _ask(module: nn.Module, state: _State, body: Body, call: CutCall, tensors: list[Tensor]) -> tuple[bool, str]:
    if reason := _structural_reason(module):
        state.verdicts[reason] = False, reason
        return state.verdicts[reason]
    flags = tuple(one for one in call.values if not isinstance(one, int | float | complex) or isinstance(one, bool))
    key = (torch.is_grad_enabled(), call.dim, call.is_cut, call.places, flags, _settings(module))
    if key not in state.verdicts:
        if len(state.verdicts) >= _MAX_VERDICTS:
            return False, f"has more than {_MAX_VERDICTS} settings, such as a counter"
        if have_values(tensors):
            state.verdicts[key] = prove(module, body, call, tensors)
        else:  # in an estimate: layers of one kind, in this and other estimates, are asked once
            shapes = tuple(one.shape for one in (*body.parameters_by_name.values(), *module.buffers()))
            if (key, shapes) not in _in_estimates:
                _in_estimates[key, shapes] = prove(module, body, call, tensors)
            state.verdicts[key] = _in_estimates[key, shapes]
    return state.verdicts[key]


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """What may decide whether a module mixes tokens: classes, modes, flags, functions, the adapter in use."""
    return tuple(_setting(value) for part in module.modules() for value in (part, *vars(part).values()))


def _setting(value: Any) -> Any:
    kind = type(value)
    if kind in _SETTINGS:
        return value
    return bool(value) if kind is float else value.__code__ if kind is FunctionType else kind


def _leave(state: _State, reason: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if state.refuse is not None and reason:
        state.refuse(state.name, reason)
    return original(*args, **kwargs)


def _structural_reason(module: nn.Module) -> str:
    """What values need not be asked for. Hooks come and go."""
    for name, part in module.named_modules():
        if isinstance(part, _MIXING):
            return f"has a {type(part).__name__}"
        if name and has_hooks(part, SEE_INPUT):
            return f"has a hook on {name} (of FSDP2, or yours), which would see tiles"
    return ""
