"""Give a model that was built on ``meta`` its memory and first values, part by part.

A model larger than the host's memory can be made if each block is given values and sharded before the next one is. The
values depend on the seed and the names of the modules, not on the number of ranks or the order of the blocks. They are
drawn from the same distributions as those of a model that is built the ordinary way, but are not the same numbers.

What does not come along: what the constructor of an outer module did to its parts (GPT scales some weights by depth)
unless its ``_init_weights`` does it. ``nn.Transformer`` resets its layers: this happens only if it is given values as a
whole.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors

from lightning_vram.private_names.torch.modules import own_buffers, own_parameters
from lightning_vram.techniques.sharding.initializers import iterate_initializers, spare_others

_SHOWN_CLASSES = 5


def has_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of ``module`` has no memory."""
    return any(tensor.is_meta for tensor in _all_tensors(module))


def materialize(
    module: nn.Module, *, seed: int, model: nn.Module | None = None, uninitialized_ok: bool = False
) -> None:
    """Give the parameters and buffers of ``module`` that are on ``meta`` memory on the host and their first values.

    Each is still the same object afterwards, so what is tied stays tied. Values come as at construction: a module's
    ``reset_parameters()``, children first, and then the ``_init_weights(part)`` of the nearest module around it that
    has one. What is not on ``meta`` keeps its values. Random numbers of the caller are not used.

    Args:
        module: Not sharded yet.
        seed: The same on all ranks.
        model: The whole model, which ``module`` is a part of: gives it its name, and the ``_init_weights`` around it.
            ``None``: ``module`` is the whole.
        uninitialized_ok: Fill with zeros what has no initializer: a checkpoint will be loaded.

    Raises:
        TypeError: If some classes do not initialize all that they have.
        ValueError: If a parameter has no shape yet, or ``module`` is no part of ``model``.
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
    """Give ``tensor`` memory in place, with values that nobody means."""
    values = torch.empty_like(tensor.detach(), device="cpu", requires_grad=False)
    values.fill_(_nobodys_value(values.dtype))
    fresh: Any = nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
    fresh.__class__ = type(tensor)
    vars(fresh).update({name: value for name, value in vars(tensor).items() if name != "_is_hf_initialized"})
    fresh.requires_grad_(tensor.requires_grad)
    swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
    return tensor


def _nobodys_value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).max


def _settle(owners: set[nn.Module], fresh: list[Tensor], *, uninitialized_ok: bool) -> None:
    """Fill with zeros what nobody initialized, or refuse it."""
    missed: dict[str, str] = {}
    for owner in owners:
        for name, tensor in _own_tensors(owner):
            if any(tensor is one for one in fresh) and _is_untouched(tensor):
                missed.setdefault(type(owner).__name__, name)
                tensor[_is_nobodys(tensor)] = 0
    if missed and not uninitialized_ok:
        shown = ", ".join(f"{kind} ({name})" for kind, name in sorted(missed.items())[:_SHOWN_CLASSES])
        raise TypeError(
            f"Parameters or buffers on the meta device have no first values: {shown}. "
            "Define reset_parameters() in these classes so that it fills all of them, or build them on the CPU."
        )


def _is_nobodys(tensor: Tensor) -> Tensor:
    value = _nobodys_value(tensor.dtype)
    return tensor.isnan() if value != value else tensor == value


def _is_untouched(tensor: Tensor) -> bool:
    if tensor.dtype is torch.bool or not tensor.numel():
        return False  # nothing tells
    return bool(_is_nobodys(tensor).any())
