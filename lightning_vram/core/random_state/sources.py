"""The random generators of a process: how to read and set their states."""

import random
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.tensors.nests import flatten_arguments

Source = tuple[Callable[[], Any], Callable[[Any], object]]
"""How to read the state of a generator, and how to set it."""

_TorchGenerator = torch.Generator  # within an estimate for CUDA the name means another class, that makes these


def global_sources(device: torch.device) -> list[Source]:
    """Return the generators that a step on ``device`` draws from by default: of the host, and of an accelerator."""
    torch_source, accelerator = _source_of_torch(torch.default_generator), accelerator_source(device)
    return [*host_sources(), torch_source, *([accelerator] if accelerator is not None else [])]


def host_sources() -> list[Source]:
    """Return the global generators that are not torch's: that of Python, then that of NumPy."""
    numpy = sys.modules.get("numpy")  # torch works without it
    python: Source = (random.getstate, random.setstate)
    return [python] if numpy is None else [python, (numpy.random.get_state, numpy.random.set_state)]


def default_source(device: torch.device) -> Source | None:
    """Return the generator that operators on ``device`` draw from; ``None`` if the device has none that can be set."""
    return _source_of_torch(torch.default_generator) if _is_host(device) else accelerator_source(device)


def accelerator_source(device: torch.device) -> Source | None:
    """As :func:`default_source`, but ``None`` for the host, and for an accelerator that is not in use."""
    if _is_host(device):
        return None
    module: Any = torch.get_device_module(device)
    is_settable = hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")
    if not is_settable or not getattr(module, "is_initialized", lambda: True)():
        return None
    arguments = () if device.type == "mps" else (device,)  # has one device and takes no name for it
    return partial(module.get_rng_state, *arguments), lambda state: module.set_rng_state(state, *arguments)


def own_sources() -> Mapping[type, Callable[[Any], Source]]:
    """Return, for each kind of generator that an object may own, what makes its source."""
    return _own_sources(sys.modules.get("numpy.random"))


def find_sources(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Source]:
    """Return the generators that a call may draw from: none, for operators of torch that never draw."""
    is_of_torch = getattr(func, "namespace", "") == "aten"
    if is_of_torch and torch.Tag.nondeterministic_seeded not in func.tags:
        return []
    leaves = flatten_arguments((args, kwargs))[0]
    generators = [torch.default_generator, *(leaf for leaf in leaves if isinstance(leaf, torch.Generator))]
    devices = {leaf.device if isinstance(leaf, Tensor) else leaf for leaf in leaves}
    accelerators = (accelerator_source(device) for device in devices if isinstance(device, torch.device))
    found = [*map(_source_of_torch, generators), *(source for source in accelerators if source is not None)]
    return found if is_of_torch else [*found, *host_sources()]


def differs(one: Any, other: Any) -> bool:
    """Whether two states of one generator differ."""
    if isinstance(one, Tensor):
        return not torch.equal(one, other)
    return _flat(one) != _flat(other)


def _flat(state: tuple[Any, ...]) -> list[Any]:
    """Return what to compare: NumPy's state holds an array, which compares as bytes."""
    # Python's holds words, then the position of the next: a draw moves the position, or makes all words anew.
    parts = (part[-9:] if type(part) is tuple else part for part in state)
    return [part.tobytes() if hasattr(part, "tobytes") else part for part in parts]


def _is_host(device: torch.device) -> bool:
    return device.type in ("cpu", "meta")


@cache
def _own_sources(numpy_random: ModuleType | None) -> dict[type, Callable[[Any], Source]]:
    kinds: dict[type, Callable[[Any], Source]] = {
        _TorchGenerator: _source_of_torch,
        random.Random: lambda generator: (generator.getstate, generator.setstate),
    }
    if numpy_random is not None:
        kinds |= {numpy_random.Generator: _source_of_numpy, numpy_random.RandomState: _source_of_old_numpy}
    return kinds


def _source_of_torch(generator: torch.Generator) -> Source:
    return generator.get_state, generator.set_state


def _source_of_numpy(generator: Any) -> Source:
    bits = generator.bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


def _source_of_old_numpy(generator: Any) -> Source:
    return partial(generator.get_state, legacy=False), generator.set_state
