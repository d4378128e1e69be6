"""Save no 16-bit casts of float32 weights under autocast: the backward casts again.

Autocast saves a cast for backward: 2 bytes per parameter. Values and gradients are bitwise identical to
``torch.autocast(..., cache_enabled=False)``. Not covered: compiled code (its partitioner recasts), weights read outside
the stock ``forward``. Writes that PyTorch does not count (through ``.data``) before the backward are not detected.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy
from torch.overrides import has_torch_function_unary

from lightning_vram.core.hooks import RecomputableTensors, is_transformed
from lightning_vram.core.patching import Swaps, has_own_forward, plain_class_forward
from lightning_vram.core.tensors.properties import PARAMETER_CLASSES, check_version
from lightning_vram.private_names import torch as private
from lightning_vram.private_names.dispatcher import FakeTensor

Place = tuple[str | None, str]
"""A child of the module, or ``None`` for itself, and the name of a parameter there."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORWARDS = frozenset(kind.forward for kind in (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED, nn.MultiheadAttention))
_CONV_FORWARDS = frozenset(private.class_conv_forward(kind) for kind in _CONVOLUTIONS)
_TRANSFORMERS = ("transformers.pytorch_utils", "Conv1D.forward")  # by name: it may not be installed
_BIASES = {"weight": "bias", "in_proj_weight": "in_proj_bias"}
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def find_places(module: nn.Module, leave_out: Collection[nn.Module]) -> tuple[Place, ...]:
    """Return the places of the float32 weights that the stock ``forward`` of ``module`` reads."""
    is_unknown = isinstance(module, torch.jit.ScriptModule) or has_own_forward(module)
    if is_unknown or hasattr(type(module), "__del__") or not _has_stock_forward(module):
        return ()
    places: list[Place] = [(None, name) for name in ("weight", *_ATTENTION_WEIGHTS)]
    if isinstance(module, nn.MultiheadAttention) and module.out_proj not in leave_out:
        places.append(("out_proj", "weight"))
    return tuple(place for place in places if _is_eligible(parameter_at(module, place)))


def parameter_at(module: nn.Module, place: Place) -> Tensor | None:
    """Return the parameter at ``place``, if there still is one."""
    child, name = place
    holder = module if child is None else private.own_children(module).get(child)
    return private.own_parameters(holder).get(name) if holder is not None else None


def read_weights(module: nn.Module, places: Collection[Place], device_type: str) -> dict[Place, Tensor]:
    """Return the weights that autocast for ``device_type`` would cast now, unless an attribute hides the parameter."""
    weights = {}
    for place in places:
        child, name = place
        attributes = vars(module if child is None else private.own_children(module)[child])
        weight = attributes[private.PARAMETERS].get(name)
        if _is_cast(weight, device_type) and name not in attributes:
            weights[place] = weight
    return weights


def with_weights(module: nn.Module, weights: dict[Place, Tensor]) -> nn.Module:
    """Return a shallow copy of ``module`` with other weights; other threads may be running the module itself."""
    twin: nn.Module = object.__new__(type(module))
    attributes = vars(twin)
    attributes.update(vars(module))
    for (child, name), weight in weights.items():
        if child is None:
            attributes[name] = weight  # found before what is in _parameters
        else:
            attributes[child] = with_weights(module.get_submodule(child), {(None, name): weight})
    return twin


def find_autocast_weights(module: nn.Module, leave_out: Collection[nn.Module] = ()) -> set[nn.Parameter]:
    """Return the float32 weights and biases that only stock layers of ``module`` read, under autocast.

    Weights with several owners are left out: a tied embedding is read in float32. Reads past the layer, by name, are
    not detected.
    """
    owners = Counter(id(p) for part in module.modules() for p in private.own_parameters(part).values() if p is not None)
    found: set[nn.Parameter] = set()
    for part in module.modules():
        if part in leave_out:
            continue
        for child, name in find_places(part, leave_out):
            holder = part if child is None else part.get_submodule(child)
            both = [private.own_parameters(holder).get(name), private.own_parameters(holder).get(_BIASES.get(name, ""))]
            found.update(p for p in both if p is not None and p.dtype is torch.float32 and owners[id(p)] == 1)
    return found


def _has_stock_forward(module: nn.Module) -> bool:
    forward = plain_class_forward(module)
    if forward in _FORWARDS:
        return not isinstance(module, _CONVOLUTIONS) or private.class_conv_forward(type(module)) in _CONV_FORWARDS
    return (forward.__module__, getattr(forward, "__qualname__", "")) == _TRANSFORMERS


def _is_eligible(weight: Tensor | None) -> bool:
    if not isinstance(weight, nn.Parameter) or is_lazy(weight):  # lazy modules change their class by themselves
        return False
    return weight.dtype is torch.float32 and weight.layout is torch.strided


def _is_cast(weight: Any, device_type: str) -> bool:
    """Not weights that are sharded, put there by a transform, or without a version counter."""
    if type(weight) not in PARAMETER_CLASSES and type(weight) is not FakeTensor:
        return False
    # A ``__torch_function__`` wants to see the call that autocast casts the weight for; a fake tensor has its own.
    if not isinstance(weight, FakeTensor) and has_torch_function_unary(weight):
        return False
    is_dense = weight.dtype is torch.float32 and weight.layout is torch.strided
    return is_dense and weight.device.type == device_type and not weight.is_inference()


@dataclass(eq=False, slots=True)
class _State:
    """What a module carries, in its ``__dict__``."""

    device_type: str
    forward: Callable[..., Any]  # of its class
    places: tuple[Place, ...]  # of the weights that ``forward`` reads


def _recast(weight: Tensor, version: int, dtype: torch.dtype) -> Tensor:
    check_version(weight, version, weight.shape)
    return weight.to(dtype)


_KEY = "_weight_casts"
_LOW_PRECISION = (torch.float16, torch.bfloat16)


class WeightCasts:
    """Casts the weights of stock layers of ``model``, in the backward again, until :meth:`remove`.

    Linear layers, convolutions, transposed ones, ``nn.MultiheadAttention`` and transformers' ``Conv1D`` with dense
    float32 weights. Copies and pickles are ordinary modules. Nothing changes outside autocast to 16 bit, in compiled
    and traced code, and in ``torch.func`` transforms. A weight that changes in place between a forward and its backward
    is an error.
    """

    def __init__(self, model: nn.Module, device_type: str, *, skip: Collection[nn.Module] = ()) -> None:
        if any(_KEY in vars(module) for module in model.modules()):
            raise ValueError(
                "model is in another running fit, or WeightCasts, with some of its modules: end or remove that first."
            )
        private.hide_warning_of_hooks()
        self._swaps = Swaps(_KEY)
        left_alone = {member for module in skip for member in module.modules()}
        for module in model.modules():
            places = find_places(module, left_alone) if module not in left_alone else ()
            if places:
                with suppress(ValueError):  # a class that cannot be changed: its module is left alone
                    self._swaps.add(module, _State(device_type, plain_class_forward(module), places), _run)

    def after_step(self, parameters: Iterable[Tensor]) -> None:
        """Note that an optimizer has changed ``parameters``, for backwards that need them: fused kernels count none."""
        modules = self._swaps.modules
        ours = {id(parameter_at(module, place)) for module in modules for place in vars(module)[_KEY].places}
        increment_version([parameter for parameter in parameters if id(parameter) in ours])

    def remove(self) -> None:
        """Give every module its class back. Twice does nothing; backwards of earlier forwards still work."""
        self._swaps.remove()


def _run(module: nn.Module, state: _State, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    is_autocast = torch.is_grad_enabled() and torch.is_autocast_enabled(state.device_type)
    if torch.compiler.is_compiling() or not is_autocast or not private.may_set_hooks():
        return original(*args, **kwargs)
    dtype = torch.get_autocast_dtype(state.device_type)
    # A technique below ours (a checkpoint, a folded norm) reads the weights of the module itself.
    is_stock = getattr(original, "__func__", None) is state.forward and not is_transformed()
    weights = read_weights(module, state.places, state.device_type) if dtype in _LOW_PRECISION and is_stock else {}
    tensors = (*weights.values(), *args, *kwargs.values())
    # Attention takes another path if autograd saves nothing.
    if not weights or not any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        return original(*args, **kwargs)
    saves = RecomputableTensors()
    # FSDP2 refills the weight itself, which is alive anyway. The backward casts by the same kernel: bit-exact.
    casts = {
        place: saves.add(weight.to(dtype), partial(_recast, weight, private.num_writes(weight), dtype))
        for place, weight in weights.items()
    }
    with saves.hooks():
        return state.forward(with_weights(module, casts), *args, **kwargs)
