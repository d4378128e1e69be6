"""Give a model on the ``meta`` device memory and initial values, part by part.

A model larger than host memory can be built if each block is materialized and sharded before the next one. Values
depend on the seed and module names, not on ranks or order; they have the distributions of the constructor, but are not
the same numbers. Missing is what an outer constructor did to its parts (GPT scales some weights by depth), unless one
of its initializers does it.
"""

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from typing_extensions import override

from lightning_vram.core.operators import iterate_written
from lightning_vram.memory.storages import iterate_storages
from lightning_vram.private_names.dispatcher import UnwrappedMode
from lightning_vram.private_names.torch import RESET_ATTENTION, storage_key

_RESETS = ("reset_parameters", RESET_ATTENTION, "init_weights")  # without arguments
_INITIALIZER = "_init_weights"  # with the part to initialize: a convention of many models, not a name of torch
_TRANSFORMERS = "transformers.modeling_utils"  # whose ``init_weights`` calls ``_init_weights``, and ties weights again


def has_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of ``module`` is a meta tensor."""
    return any(tensor.is_meta for _, tensor in _named_tensors(module))


def materialize(
    module: nn.Module, *, seed: int, model: nn.Module | None = None, uninitialized_ok: bool = False
) -> None:
    """Give meta parameters and buffers of ``module`` host memory and initial values, in place: tied ones stay tied.

    Values come from ``reset_parameters()`` or ``init_weights()`` of each module in and around ``module``, inner ones
    first, then from ``_init_weights(part)`` of the nearest module around each part that has one. Other tensors of
    ``model``, the whole of which ``module`` is a part, and the caller's RNG state, are unchanged. Tensors without an
    initializer are a ``TypeError``, or become zeros if ``uninitialized_ok``: a checkpoint will be loaded.
    """
    model = model or module
    fresh = {id(tensor): tensor for _, tensor in _named_tensors(module) if tensor.is_meta}
    if not fresh:
        return
    others = [tensor for _, tensor in _named_tensors(model) if id(tensor) not in fresh]
    for tensor in fresh.values():
        # Module.to_empty would make new objects, neither tied nor in the caller's lists, and empty those with values.
        filled: Any = torch.empty_like(tensor.detach(), device="cpu")
        filled.fill_(_marker(tensor.dtype))
        filled.__class__ = type(tensor)
        vars(filled).update(vars(tensor))
        filled.requires_grad_(tensor.requires_grad)
        swap_tensors(tensor, filled)  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _Unchanged(others):
        for name, initialize in _iterate_initializers(module, model, fresh):
            digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest))
            initialize()
        _settle(module, fresh, uninitialized_ok=uninitialized_ok)


def _named_tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, each once."""
    yield from module.named_parameters(recurse=recurse)
    yield from module.named_buffers(recurse=recurse)


def _marker(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).max


def _settle(module: nn.Module, fresh: Collection[int], *, uninitialized_ok: bool) -> None:
    """Zero or refuse uninitialized tensors."""
    missed: dict[str, str] = {}
    owned = ((part, *named) for part in module.modules() for named in _named_tensors(part, recurse=False))
    for part, name, tensor in owned:
        if id(tensor) not in fresh or tensor.dtype is torch.bool:
            continue
        marker = _marker(tensor.dtype)
        is_missed = tensor.isnan() if marker != marker else tensor == marker
        if is_missed.any():
            missed.setdefault(type(part).__name__, name)
            tensor.masked_fill_(is_missed, 0)
    if missed and not uninitialized_ok:
        shown = ", ".join(f"{kind} ({name})" for kind, name in sorted(missed.items())[:5])
        raise TypeError(
            f"Parameters or buffers on the meta device have no initial values: {shown}. "
            "Define reset_parameters() in these classes, or build them on the CPU."
        )


def _iterate_initializers(
    module: nn.Module, model: nn.Module, fresh: Collection[int]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield named calls that initialize the ``fresh`` tensors (ids) in ``module``, a part of ``model``."""
    names = {part: name for name, part in model.named_modules()}
    inside = [part for part in module.modules() if any(id(tensor) in fresh for _, tensor in _named_tensors(part))]
    scopes = dict.fromkeys(reversed(inside), "")
    scopes |= {part: names[module] for part in _outwards(model, names[module]) if part is not module}
    for part, scope in scopes.items():
        resets = (getattr(part, name, None) for name in _RESETS)
        reset = next((call for call in resets if _takes(call) and call.__module__ != _TRANSFORMERS), None)
        if reset is not None:
            yield f"{names[part]}:{scope}:reset", reset
    for part, scope in scopes.items():
        initializers = (getattr(outer, _INITIALIZER, None) for outer in _outwards(model, names[part]))
        initialize = next((call for call in initializers if _takes(call, part)), None)
        if initialize is not None:
            yield f"{names[part]}:{scope}", partial(initialize, part)


def _outwards(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the module ``name`` of ``model`` and those around it, inner ones first."""
    while name:
        yield model.get_submodule(name)
        name = name.rpartition(".")[0]
    yield model


def _takes(function: Any, *args: Any) -> bool:
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


class _Unchanged(UnwrappedMode):
    """Skips writes to ``tensors`` in a ``with`` block: initializers write to all of a module, and to its children."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {storage_key(storage) for tensor in tensors for storage, _ in iterate_storages(tensor)}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in iterate_written(func, args, kwargs):
            if any(storage_key(storage) in self._storages for storage, _ in iterate_storages(tensor)):
                return tensor
        return func(*args, **kwargs or {})
