"""Where an operator that is not run again would have left the random generators."""

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_vram.techniques.host_random import states_differ
from lightning_vram.techniques.leaves import flatten_arguments

Source = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How to read the state of a generator, and how to set it."""


def find_sources(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Source]:
    """Return the generators that a call may draw from: none, for operators of torch that never draw."""
    is_of_torch = getattr(func, "namespace", "") == "aten"
    if is_of_torch and torch.Tag.nondeterministic_seeded not in func.tags:
        return []
    leaves = flatten_arguments((args, kwargs))[0]
    generators = [torch.default_generator, *(leaf for leaf in leaves if isinstance(leaf, torch.Generator))]
    devices = {leaf.device if isinstance(leaf, Tensor) else leaf for leaf in leaves}
    generators += [
        torch.get_device_module(device.type).default_generators[_index_of(device)]
        for device in devices
        if isinstance(device, torch.device) and device.type not in ("cpu", "meta")
    ]
    sources: list[Source] = [(generator.get_state, generator.set_state) for generator in generators]
    if not is_of_torch:
        sources.append((random.getstate, random.setstate))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            sources.append((numpy.random.get_state, numpy.random.set_state))
    return sources


def differs(one: Any, other: Any) -> bool:
    """Whether two states of one generator differ."""
    if isinstance(one, Tensor):
        return not torch.equal(one, other)
    return states_differ(one, other)


def _index_of(device: torch.device) -> int:
    index: int | None = device.index
    return index if index is not None else int(torch.get_device_module(device.type).current_device())
