"""Keep fewer 16-bit casts of 32-bit weights under autocast: one per weight, or none.

Autocast casts the weight of a linear layer or a convolution at each call, and autograd keeps the cast for the
backward: 2 bytes per parameter, and as much again for each further use in the step. Here all uses share one
(:mod:`~lightning_vram.techniques.mixed_precision.weight_casts`), or the backward casts again
(``recast_saves.py``), which costs one more cast per call and some Python. Values and
gradients are those of ``torch.autocast(..., cache_enabled=False)``, to the bit.

It helps during the forward and for as long as its graph waits. It does not help where the peak is at the end of the
backward, nor compiled code, where the partitioner casts again by itself, nor weights that a module reads elsewhere than
in the ``forward`` of its stock class. Nothing is shared inside of selective checkpoints. Writes that PyTorch does not
count (through ``.data``) between the forward and its backward, or between two uses in a step, are not seen, where plain
autocast keeps a cast from before.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy
from torch.overrides import has_torch_function_unary

from lightning_vram.core.hooks import RecomputableTensors, is_in_selective_checkpoint, is_transformed
from lightning_vram.core.patching import Swaps, has_own_forward, plain_class_forward, restore_class
from lightning_vram.core.tensors.properties import PARAMETER_CLASSES, check_version, storage_address
from lightning_vram.memory.device.accelerators import is_capturing, stream_id
from lightning_vram.private_names.dispatcher import FakeTensor, without_dispatch
from lightning_vram.private_names.torch import (
    PARAMETERS,
    class_conv_forward,
    hide_warning_of_hooks,
    may_set_hooks,
    num_writes,
    own_children,
    own_parameters,
)

# Find the weights that autocast casts in one call of a stock module, and run the module with others.
#
# :mod:`~lightning_vram.techniques.mixed_precision.weight_casts` decides what they are.

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


# Let several uses of one weight share one 16-bit cast, as long as autograd keeps that alive for the backward.
#
# Autocast makes a cast at each use, and autograd keeps each: n copies of a weight that is used n times in a step. Its
# own cache makes one, but keeps it to the end of the ``autocast`` block, also under ``no_grad`` and in checkpointed
# layers, where nobody needs it. Here nothing is kept: a weak reference tells whether the memory of an earlier cast
# still lives.
#
# Each use has an edge of its own in the graph, so that the gradient of each is cast to 32 bit before they are summed:
# equal to the bit to autocast without its cache.
#
# Looking for a cast costs some Python at each call, and most weights are used once in a step: :class:`Sharing` tells
# for which it is worth while.

_Key = tuple[int, torch.dtype, int]  # identity of the weight, dtype of the cast, stream


class _SharedCast:
    """The cast that was made last of the present values of a weight, by its memory: views of it outlive the tensor."""

    __slots__ = ("_address", "_storage", "_strides", "_version", "_weight")

    def __init__(self, weight: Tensor, cast: Tensor) -> None:
        self._weight = weakref.ref(weight)  # its identity may be another's after its death
        self._version = num_writes(weight)
        self._address = storage_address(weight)  # ``weight.data = other`` counts no version
        self._strides = cast.stride()
        self.note(cast)

    def note(self, cast: Tensor) -> None:
        """Remember another cast of the same values."""
        self._storage = weakref.ref(cast.untyped_storage())

    def is_of(self, weight: Tensor) -> bool:
        """Whether ``weight`` still is what the cast was made of."""
        is_same = self._version == num_writes(weight) and self._weight() is weight
        return is_same and self._address == storage_address(weight)

    def find(self) -> torch.UntypedStorage | None:
        """Return the memory, if autograd keeps it."""
        return self._storage()

    def make(self, storage: torch.UntypedStorage, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return another tensor on the memory that :meth:`find` found."""
        is_fake = isinstance(weight, FakeTensor)
        # A second run of a layer may find a cast that its first did not: modes that compare the two see neither.
        with nullcontext() if is_fake else without_dispatch():
            offset = 0
            empty: Any = weight.new_empty(0, dtype=dtype)
            tensor: Tensor = empty.set_(storage, offset, weight.shape, self._strides)
            return tensor


class _UseAgain(torch.autograd.Function):
    """The cast of a weight, in memory that holds it already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, shared: _SharedCast, storage: list[Any]) -> Tensor:
        ctx.dtype = weight.dtype
        return shared.make(storage.pop(), weight, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None, None, None


class SharedCasts:
    """Makes casts of weights, one for all uses at a time."""

    def __init__(self) -> None:
        self._casts: dict[_Key, _SharedCast] = {}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Return ``weight`` in ``dtype``, differentiably, and whether in memory of an earlier cast of the same values.

        Never write to it.
        """
        stream = 0 if weight.is_cpu or isinstance(weight, FakeTensor) else _stream_of(weight.device)
        if stream is None:
            return weight.to(dtype), False
        key = id(weight), dtype, stream
        shared = self._casts.get(key)
        if shared is None or not shared.is_of(weight):
            cast = weight.to(dtype)
            self._casts[key] = _SharedCast(weight, cast)
            return cast, False
        storage = shared.find()
        if storage is None:
            cast = weight.to(dtype)
            shared.note(cast)
            return cast, False
        again: Tensor = _UseAgain.apply(weight, dtype, shared, [storage])  # type: ignore[no-untyped-call]
        return again, True

    def forget(self) -> None:
        """Use none of the casts made so far again: weights may have changed without a trace."""
        self._casts.clear()


@dataclass(eq=False, slots=True)
class Sharing:
    """Uses of a weight by some modules, which may share casts.

    Args:
        casts: To look in.
        has_run: Whether one of them ran under autocast, recorded by autograd.
        has_shared: Whether a use found the cast of another.
    """

    casts: SharedCasts
    has_run: bool = False
    has_shared: bool = False

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """See :meth:`SharedCasts.cast`."""
        cast, is_shared = self.casts.cast(weight, dtype)
        self.has_shared |= is_shared
        return cast


def _stream_of(device: torch.device) -> int | None:
    """What kernels of this thread are ordered by; ``None`` if a cast may not be shared with later ones at all."""
    return None if is_capturing(device) else stream_id(device)  # a replay runs without what went before


# Let autograd keep a 32-bit weight, which is alive anyway, in the place of the 16-bit cast that was made of it.
#
# The backward casts again: the same kernel on the same values, so gradients are equal to the bit.


def cast(saves: RecomputableTensors, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``weight`` in ``dtype``, differentiably. Among ``saves`` it is the weight, itself: FSDP2 refills it."""
    return saves.add(weight.to(dtype), partial(_recast, weight, num_writes(weight), dtype))


def _recast(weight: Tensor, version: int, dtype: torch.dtype) -> Tensor:
    try:
        check_version(weight, version, weight.shape)
    except RuntimeError as error:
        raise RuntimeError(
            f"{error} It is a weight, which the backward casts to {str(dtype).removeprefix('torch.')} again: "
            "use recast_in_backward=False, which saves a copy."
        ) from None
    return weight.to(dtype)


_KEY = "_weight_casts"
_LOW_PRECISION = (torch.float16, torch.bfloat16)


class WeightCasts:
    """Makes the casts of the weights of ``model`` from now on, until :meth:`remove`.

    Linear layers, convolutions, transposed ones, ``nn.MultiheadAttention`` and the ``Conv1D`` of transformers, with
    the ``forward`` of these classes and with dense 32-bit parameters for weights; others are left alone. Modules keep
    their names and their parameters; copies and pickles are plain modules. Nothing is changed outside of autocast to
    16 bit, in compiled and traced code, and in ``torch.func`` transforms.

    Args:
        model: Any module.
        device_type: Whose autocast is meant, ``"cuda"`` or ``"cpu"``.
        recast_in_backward: Let autograd keep no cast. A weight that was changed in place between a forward and its
            backward is then an error.
        skip: Modules that are left alone, with all inside them.

    Raises:
        ValueError: If there is no autocast for ``device_type``, or a part of ``model`` is in another one.
    """

    def __init__(
        self, model: nn.Module, device_type: str, *, recast_in_backward: bool = False, skip: Collection[nn.Module] = ()
    ) -> None:
        if not _has_autocast(device_type):
            raise ValueError(f"device_type must be one that torch.autocast knows, got {device_type!r}.")
        if any(_KEY in vars(module) for module in model.modules()):
            raise ValueError(
                "model is in another running fit, or WeightCasts, with some of its modules, and a module can be in one "
                "at a time: end that fit, or call remove(), first."
            )
        if recast_in_backward:
            hide_warning_of_hooks()
        self._recast_in_backward = recast_in_backward
        self._casts = SharedCasts()
        self._swaps = Swaps(_KEY)
        sharings: dict[int, Sharing] = {}  # by identity of the first weight, for all modules that have it
        self._undecided: list[tuple[nn.Module, Sharing]] = []
        left_alone = {member for module in skip for member in module.modules()}
        for module in model.modules():
            places = find_places(module, left_alone) if module not in left_alone else ()
            if not places:
                continue
            sharing = None
            if not recast_in_backward:
                sharing = sharings.setdefault(id(parameter_at(module, places[0])), Sharing(self._casts))
            with suppress(ValueError):  # a class that cannot be changed: its module is left alone
                self._swaps.add(module, _State(device_type, plain_class_forward(module), places, sharing), _run)
                if sharing is not None:
                    self._undecided.append((module, sharing))

    def after_step(self, parameters: Iterable[Tensor]) -> None:
        """Say that an optimizer has changed ``parameters``: fused kernels do so without a trace.

        Casts made before are not used for another forward. Modules whose weights found no second use in the first step
        that ran them get their class back. With ``recast_in_backward``, a backward that would need one of these as it
        was raises ``RuntimeError``.

        Args:
            parameters: Those of the optimizer, ours or not.
        """
        self._restore_unshared()
        self._casts.forget()  # all: FSDP2 steps on shards, which are others than the weights of the forward
        if self._recast_in_backward:
            modules = self._swaps.modules
            ours = {id(parameter_at(module, place)) for module in modules for place in vars(module)[_KEY].places}
            increment_version([parameter for parameter in parameters if id(parameter) in ours])

    def remove(self) -> None:
        """Give every module its class back. Twice does nothing; backwards of earlier forwards still work."""
        self._undecided.clear()
        self._swaps.remove()
        self._casts.forget()

    def _restore_unshared(self) -> None:
        waiting = [(module, sharing) for module, sharing in self._undecided if not sharing.has_run]
        if len(waiting) == len(self._undecided):
            return
        for module, sharing in self._undecided:
            if sharing.has_run and not sharing.has_shared:
                restore_class(module, _KEY)
        self._undecided = waiting
        self._swaps.modules = [module for module in self._swaps.modules if _KEY in vars(module)]


@dataclass(eq=False, slots=True)
class _State:
    """What a module carries, in its ``__dict__``.

    Args:
        device_type: Whose autocast is meant.
        forward: The one of its class, which reads the weights of the object it gets.
        places: Where these weights are.
        sharing: With other uses; ``None``: casts are made again in the backward.
    """

    device_type: str
    forward: Callable[..., Any]
    places: tuple[Place, ...]
    sharing: Sharing | None


def _run(module: nn.Module, state: _State, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``module.forward``, which is ``plain``."""
    is_compiling = torch.compiler.is_compiling()
    if is_compiling or not (torch.is_grad_enabled() and torch.is_autocast_enabled(state.device_type)):
        return plain(*args, **kwargs)
    sharing = state.sharing
    if sharing is not None:
        sharing.has_run = True
        # A result that is kept keeps a cast alive, which the second run would find where the first had made it.
        if is_in_selective_checkpoint():
            return plain(*args, **kwargs)
    dtype = torch.get_autocast_dtype(state.device_type)
    # A technique below ours (a checkpoint, a folded norm) reads the weights of the module itself.
    is_stock = getattr(plain, "__func__", None) is state.forward and not is_transformed()
    weights = read_weights(module, state.places, state.device_type) if dtype in _LOW_PRECISION and is_stock else {}
    if not weights or not _is_recorded(weights, args, kwargs):
        return plain(*args, **kwargs)
    if sharing is not None:
        casts = {place: sharing.cast(weight, dtype) for place, weight in weights.items()}
        return state.forward(with_weights(module, casts), *args, **kwargs)
    if not may_set_hooks():
        return plain(*args, **kwargs)
    saves = RecomputableTensors()
    casts = {place: cast(saves, weight, dtype) for place, weight in weights.items()}
    with saves.hooks():
        return state.forward(with_weights(module, casts), *args, **kwargs)


def _is_recorded(weights: dict[Place, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there are weights to cast, and autograd keeps anything: attention takes another path if it does not."""
    for weight in weights.values():
        if weight.requires_grad:
            return True
    inputs = (*args, *kwargs.values()) if weights else ()
    return any(isinstance(input, Tensor) and input.requires_grad for input in inputs)


def _has_autocast(device_type: str) -> bool:
    try:
        return torch.amp.is_autocast_available(device_type)
    except RuntimeError:  # no device at all
        return False
