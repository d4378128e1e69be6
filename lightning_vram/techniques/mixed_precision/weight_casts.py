"""Keep fewer 16-bit casts of 32-bit weights under autocast: one per weight, or none.

Autocast casts the weight of a linear layer or a convolution at each call, and autograd keeps the cast for the
backward: 2 bytes per parameter, and as much again for each further use in the step. Here all uses share one
(:mod:`~lightning_vram.techniques.mixed_precision.shared_casts`), or the backward casts again
(``recast_saves.py``), which costs one more cast per call and some Python. Values and
gradients are those of ``torch.autocast(..., cache_enabled=False)``, to the bit.

It helps during the forward and for as long as its graph waits. It does not help where the peak is at the end of the
backward, nor compiled code, where the partitioner casts again by itself, nor weights that a module reads elsewhere than
in the ``forward`` of its stock class. Nothing is shared inside of selective checkpoints. Writes that PyTorch does not
count (through ``.data``) between the forward and its backward, or between two uses in a step, are not seen, where plain
autocast keeps a cast from before.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_vram.core.hooks.moment import is_in_selective_checkpoint, is_transformed
from lightning_vram.core.hooks.remade_saves import RemadeSaves
from lightning_vram.core.surgery.class_swap import Swaps, plain_class_forward, restore_class
from lightning_vram.private_names.torch.autograd import hide_warning_of_hooks, may_set_hooks
from lightning_vram.techniques.mixed_precision.autocast_weights import (
    Place,
    find_places,
    parameter_at,
    read_weights,
    with_weights,
)
from lightning_vram.techniques.mixed_precision.recast_saves import cast
from lightning_vram.techniques.mixed_precision.shared_casts import SharedCasts, Sharing

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
    saves = RemadeSaves()
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
