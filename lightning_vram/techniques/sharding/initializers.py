"""Find what gives the parameters of a module their first values.

By custom that is ``reset_parameters()`` of the module that has them, or ``_init_weights(part)`` of a module around it,
which is called for every part (transformers, nanoGPT).
"""

import inspect
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_vram.private_names.torch.modules import RESET_ATTENTION, own_buffers, own_parameters

_RESETS = ("reset_parameters", RESET_ATTENTION)
_INITIALIZER = "_init_weights"
_KEPT = "_is_hf_initialized"  # transformers from 5.0 leaves tensors with this mark alone


def iterate_initializers(
    module: nn.Module, model: nn.Module, empty: Container[nn.Module]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls that initialize ``module``, each under a name of its own: resets first, and inner parts first.

    Args:
        module: What is to be initialized.
        model: The model it is a part of.
        empty: Modules that have something without values themselves, or that have nothing else. Only these are
            initialized, but by an ``_init_weights`` that leaves marked tensors alone (:func:`spare_others`): that is
            called for modules around them, too. Some of transformers fill the weights of their children.
    """
    names = {part: name for name, part in model.named_modules()}
    inside = set(module.modules())
    parts = [part for part in reversed(names) if part in inside]
    for part in parts:
        reset = next(filter(_takes, (getattr(part, name, None) for name in _RESETS)), None)
        if part in empty and reset is not None:
            yield f"{names[part]}:reset", _keeping(part, reset)
    path = names[module].split(".")
    around = [model.get_submodule(".".join(path[:length])) for length in reversed(range(len(path)))] if path[0] else []
    for part in chain(parts, around):
        owner = _find_owner(model, names[part])
        if owner is not None and (part in empty or _spares(owner)):
            scope = "" if part in inside else names[module]
            yield f"{names[part]}:{scope}", _keeping(part, partial(getattr(owner, _INITIALIZER), part))


@contextmanager
def spare_others(model: nn.Module, fresh: Sequence[Tensor]) -> Iterator[None]:
    """Mark all parameters and buffers of ``model`` but ``fresh`` ones as initialized, for the time of the block."""
    known = {id(tensor) for tensor in fresh}
    others = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in known]
    others = [tensor for tensor in others if not hasattr(tensor, _KEPT)]
    for tensor in others:
        setattr(tensor, _KEPT, True)
    try:
        yield
    finally:
        for tensor in others:
            delattr(tensor, _KEPT)


def _keeping(part: nn.Module, initialize: Callable[[], object]) -> Callable[[], None]:
    """Return ``initialize``, but tensors of ``part`` itself that are marked keep their values."""

    def run() -> None:
        own = [tensor for tensor in (*own_parameters(part).values(), *own_buffers(part).values()) if tensor is not None]
        kept = [(tensor, tensor.clone()) for tensor in own if hasattr(tensor, _KEPT)]
        initialize()
        for tensor, values in kept:
            tensor.copy_(values)

    return run


def _find_owner(model: nn.Module, name: str) -> nn.Module | None:
    """Return the nearest module, from the one called ``name`` outwards, that initializes its parts."""
    parts = name.split(".") if name else []
    for length in range(len(parts), -1, -1):
        owner = model.get_submodule(".".join(parts[:length]))
        if _takes(getattr(owner, _INITIALIZER, None), owner):
            return owner
    return None


def _spares(owner: nn.Module) -> bool:
    """Whether its ``_init_weights`` is transformers', which knows the mark: a check that imports nothing."""
    return hasattr(owner, "_initialize_weights") and any(
        base.__module__ == "transformers.modeling_utils" for base in type(owner).__mro__
    )


def _takes(function: Any, *args: Any) -> bool:
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError):
        return False
    return True
