"""Find the weights that autocast casts in one call of a stock module, and run the module with others.

:mod:`~lightning_vram.techniques.mixed_precision.weight_casts` decides what they are.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import has_torch_function_unary

from lightning_vram.core.surgery.class_swap import has_own_forward, plain_class_forward
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES
from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.private_names.torch.modules import PARAMETERS, class_conv_forward, own_children, own_parameters

Place = tuple[str | None, str]
"""A child of the module, or ``None`` for itself, and the name of a parameter there."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORWARDS = frozenset(kind.forward for kind in (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED, nn.MultiheadAttention))
_CONV_FORWARDS = frozenset(class_conv_forward(kind) for kind in _CONVOLUTIONS)
_TRANSFORMERS = ("transformers.pytorch_utils", "Conv1D.forward")  # by name: it may not be installed
_BIASES = {"weight": "bias", "in_proj_weight": "in_proj_bias"}
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def find_places(module: nn.Module, leave_out: Collection[nn.Module]) -> tuple[Place, ...]:
    """Return where the 32-bit weights are that the ``forward`` of ``module`` reads; none if it is not one we know.

    One with a ``forward`` of its own, scripted and lazy ones have none; those of modules in ``leave_out`` are not
    wanted.
    """
    if isinstance(module, torch.jit.ScriptModule) or has_own_forward(module) or hasattr(type(module), "__del__"):
        return ()
    if not _has_stock_forward(module):
        return ()
    places: list[Place] = [(None, name) for name in ("weight", *_ATTENTION_WEIGHTS)]
    if isinstance(module, nn.MultiheadAttention) and module.out_proj not in leave_out:
        places.append(("out_proj", "weight"))
    return tuple(place for place in places if _is_eligible(parameter_at(module, place)))


def parameter_at(module: nn.Module, place: Place) -> Tensor | None:
    """Return the parameter at ``place``; ``None`` if there is none (any more)."""
    child, name = place
    holder = module if child is None else own_children(module).get(child)
    return own_parameters(holder).get(name) if holder is not None else None


def read_weights(module: nn.Module, places: Collection[Place], device_type: str) -> dict[Place, Tensor]:
    """Return the weights that autocast for ``device_type`` would cast now, and that stand where they belong."""
    weights = {}
    for place in places:
        child, name = place
        attributes = vars(module if child is None else own_children(module)[child])
        weight = attributes[PARAMETERS].get(name)
        if _is_cast(weight, device_type) and name not in attributes:
            weights[place] = weight
    return weights


def with_weights(module: nn.Module, weights: dict[Place, Tensor]) -> nn.Module:
    """Return an object like ``module`` with other weights, for one call of its stock ``forward``.

    The module itself stays as it is: other threads may be running it, and nothing has to be put back after an error.
    """
    twin: nn.Module = object.__new__(type(module))
    attributes = vars(twin)
    attributes.update(vars(module))
    for (child, name), weight in weights.items():
        if child is None:
            attributes[name] = weight  # found before what is in _parameters
        else:
            attributes[child] = with_weights(module.get_submodule(child), {(None, name): weight})
    return twin


def find_narrow_weights(module: nn.Module, leave_out: Collection[nn.Module] = ()) -> set[nn.Parameter]:
    """Return the float32 weights and biases that stock layers of ``module`` read under autocast, and nobody else.

    Those of linear layers, convolutions, attention and transformers' ``Conv1D``: they need not come in 32 bit. A weight
    with several owners is not among them: a tied embedding is read in float32. What is used by name elsewhere, past the
    layer, is not seen.

    Args:
        module: Any module.
        leave_out: Modules that compute in float32.
    """
    owners = Counter(id(p) for part in module.modules() for p in own_parameters(part).values() if p is not None)
    narrow: set[nn.Parameter] = set()
    for part in module.modules():
        if part in leave_out:
            continue
        for child, name in find_places(part, leave_out):
            holder = part if child is None else part.get_submodule(child)
            found = [own_parameters(holder).get(name), own_parameters(holder).get(_BIASES.get(name, ""))]
            narrow.update(p for p in found if p is not None and p.dtype is torch.float32 and owners[id(p)] == 1)
    return narrow


def _has_stock_forward(module: nn.Module) -> bool:
    forward = plain_class_forward(module)
    if forward in _FORWARDS:
        return not isinstance(module, _CONVOLUTIONS) or class_conv_forward(type(module)) in _CONV_FORWARDS
    return (forward.__module__, getattr(forward, "__qualname__", "")) == _TRANSFORMERS


def _is_eligible(weight: Tensor | None) -> bool:
    if not isinstance(weight, nn.Parameter) or is_lazy(weight):  # lazy modules change their class by themselves
        return False
    return weight.dtype is torch.float32 and weight.layout is torch.strided


def _is_cast(weight: Any, device_type: str) -> bool:
    """Not those that are sharded, were put there by a transform, or have no version."""
    if type(weight) not in PARAMETER_CLASSES and type(weight) is not FakeTensor:
        return False
    # Somebody wants to see the call that autocast casts it for; of fake ones those who let them be fake.
    if not isinstance(weight, FakeTensor) and has_torch_function_unary(weight):
        return False
    is_dense = weight.dtype is torch.float32 and weight.layout is torch.strided
    return is_dense and weight.device.type == device_type and not weight.is_inference()
