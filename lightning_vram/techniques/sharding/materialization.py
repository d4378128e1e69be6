"""Give a model on the ``meta`` device memory and initial values, part by part.

A model larger than host memory can be built if each block is materialized and sharded before the next one. Values
depend on the seed and module names, not on ranks or order; they have the distributions of the constructor, but are not
the same numbers. Missing is what an outer constructor did to its parts (GPT scales some weights by depth), unless its
``_init_weights`` does it; ``nn.Transformer`` resets its layers only if materialized as a whole.
"""

import hashlib
import inspect
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors

from lightning_vram.private_names.torch import RESET_ATTENTION, own_buffers, own_parameters


def has_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of ``module`` is a meta tensor."""
    return any(tensor.is_meta for tensor in _all_tensors(module))


def materialize(
    module: nn.Module, *, seed: int, model: nn.Module | None = None, uninitialized_ok: bool = False
) -> None:
    """Give meta parameters and buffers of ``module`` host memory and initial values, in place: tied ones stay tied.

    Values come from each module's ``reset_parameters()``, children first, then from ``_init_weights(part)`` of the
    nearest module around it that has one. Other tensors, and the caller's RNG state, are unchanged.

    Args:
        module: Not sharded yet.
        seed: The same on all ranks.
        model: The whole model, for names and the ``_init_weights`` around ``module``; ``None``: ``module``.
        uninitialized_ok: Set tensors without an initializer to zero: a checkpoint will be loaded.

    Raises:
        TypeError: If some classes do not initialize all tensors.
        ValueError: If a parameter has no shape yet, or ``module`` is not in ``model``.
    """
    model = model or module
    _check(module, model)
    owners = {part for part in module.modules() if any(tensor.is_meta for _, tensor in _own_tensors(part))}
    if not owners:
        return
    whole = {part for part in module.modules() if all(tensor.is_meta for tensor in _all_tensors(part))}
    fresh = [_allocate(tensor) for tensor in _all_tensors(module) if tensor.is_meta]
    with torch.random.fork_rng(devices=[]), torch.no_grad(), spare_others(model, fresh):
        for name, initialize in iterate_initializers(module, model, owners | whole):
            digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest))
            initialize()
        _settle(owners, fresh, uninitialized_ok=uninitialized_ok)


def _check(module: nn.Module, model: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name!r} has no shape yet: run the model on a batch before it is sharded.")
    if not any(module is part for part in model.modules()):
        raise ValueError(f"materialize(model) must contain the module, got {type(model).__name__} without it.")


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for named in (own_parameters(module), own_buffers(module)):
        yield from ((name, tensor) for name, tensor in named.items() if tensor is not None)


def _all_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return [*{id(tensor): tensor for part in module.modules() for _, tensor in _own_tensors(part)}.values()]


def _allocate(tensor: Tensor) -> Tensor:
    """Give ``tensor`` memory in place, filled with a marker."""
    values = torch.empty_like(tensor.detach(), device="cpu", requires_grad=False)
    values.fill_(_marker(values.dtype))
    fresh: Any = nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
    fresh.__class__ = type(tensor)
    vars(fresh).update({name: value for name, value in vars(tensor).items() if name != _INITIALIZED})
    fresh.requires_grad_(tensor.requires_grad)
    swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
    return tensor


def _marker(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).max


def _settle(owners: set[nn.Module], fresh: list[Tensor], *, uninitialized_ok: bool) -> None:
    """Zero or refuse uninitialized tensors."""
    missed: dict[str, str] = {}
    for owner in owners:
        for name, tensor in _own_tensors(owner):
            has_marker = tensor.dtype is not torch.bool and any(tensor is one for one in fresh)
            if has_marker and _is_marker(tensor).any():
                missed.setdefault(type(owner).__name__, name)
                tensor[_is_marker(tensor)] = 0
    if missed and not uninitialized_ok:
        shown = ", ".join(f"{kind} ({name})" for kind, name in sorted(missed.items())[:5])
        raise TypeError(
            f"Parameters or buffers on the meta device have no initial values: {shown}. "
            "Define reset_parameters() in these classes, or build them on the CPU."
        )


def _is_marker(tensor: Tensor) -> Tensor:
    value = _marker(tensor.dtype)
    return tensor.isnan() if value != value else tensor == value


_RESETS = ("reset_parameters", RESET_ATTENTION)
_INITIALIZER = "_init_weights"
_INITIALIZED = "_is_hf_initialized"  # transformers from 5.0 skips tensors with this mark


def iterate_initializers(
    module: nn.Module, model: nn.Module, empty: Container[nn.Module]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield named calls that initialize ``module``, a part of ``model``: resets first, and inner parts first.

    ``empty``: modules that own a tensor without values, or have nothing else. Only these are initialized, except by an
    ``_init_weights`` that spares marked tensors (:func:`spare_others`), which is called for modules around them, too:
    some of transformers fill the weights of their children.
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
    """Mark all parameters and buffers of ``model`` but ``fresh`` ones as initialized, within the block."""
    known = {id(tensor) for tensor in fresh}
    others = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in known and not hasattr(t, _INITIALIZED)]
    for tensor in others:
        setattr(tensor, _INITIALIZED, True)
    try:
        yield
    finally:
        for tensor in others:
            delattr(tensor, _INITIALIZED)


def _keeping(part: nn.Module, initialize: Callable[[], object]) -> Callable[[], None]:
    """Return ``initialize``, but marked tensors of ``part`` itself keep their values."""

    def run() -> None:
        saved = [(tensor, tensor.clone()) for _, tensor in _own_tensors(part) if hasattr(tensor, _INITIALIZED)]
        initialize()
        for tensor, values in saved:
            tensor.copy_(values)

    return run


def _find_owner(model: nn.Module, name: str) -> nn.Module | None:
    """Return the nearest module, from ``name`` outwards, that initializes its parts."""
    parts = name.split(".") if name else []
    for length in range(len(parts), -1, -1):
        owner = model.get_submodule(".".join(parts[:length]))
        if _takes(getattr(owner, _INITIALIZER, None), owner):
            return owner
    return None


def _spares(owner: nn.Module) -> bool:
    """Whether its ``_init_weights`` is transformers', which respects the mark; imports nothing."""
    return hasattr(owner, "_initialize_weights") and any(
        base.__module__ == "transformers.modeling_utils" for base in type(owner).__mro__
    )


def _takes(function: Any, *args: Any) -> bool:
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError):
        return False
    return True
