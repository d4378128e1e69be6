"""Where an operator that is not run again would have left the random generators."""

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.random_state.defaults import device_generator
from lightning_vram.core.random_state.host import states_differ
from lightning_vram.core.tensors.nests import flatten_arguments

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
    accelerators = [d for d in devices if isinstance(d, torch.device) and d.type not in ("cpu", "meta")]
    sources: list[Source] = [(generator.get_state, generator.set_state) for generator in generators]
    sources += [source for device in accelerators if (source := default_source(device)) is not None]
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


def default_source(device: torch.device) -> Source | None:
    """Return the generator that operators on ``device`` draw from; ``None`` if the device has none that can be set."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator.get_state, torch.default_generator.set_state
    module, arguments = device_generator(device)
    if not (hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")):
        return None
    return partial(module.get_rng_state, *arguments), lambda state: module.set_rng_state(state, *arguments)
