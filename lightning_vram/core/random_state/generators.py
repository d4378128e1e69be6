"""States of random generators that ``torch.load(weights_only=True)`` reads."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.random_state.sources import accelerator_source

State = dict[str, Any]
"""Made of tensors, numbers, strings, ``None``, lists and dictionaries."""


def is_generator(value: object) -> bool:
    """Whether ``value`` is a generator whose state can be read: one of torch, ``random.Random`` or one of NumPy."""
    numpy = sys.modules.get("numpy")  # torch works without it
    kinds: tuple[type, ...] = (torch.Generator,)
    if numpy is not None:
        kinds += (numpy.random.RandomState, numpy.random.Generator, numpy.random.BitGenerator)
    return isinstance(value, kinds) or getattr(type(value), "getstate", None) is random.Random.getstate


def read_state(generator: Any) -> State:
    """Return the state of a generator, or of the module ``random`` or ``numpy.random``, as a copy."""
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state()}
    if hasattr(generator, "getstate"):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": torch.tensor(words), "gauss": gauss}
    encoded: State = _encode(_numpy_state(generator))
    return encoded


def write_state(generator: Any, state: State) -> None:
    """Set the state of a generator to what :func:`read_state` has returned for one of its kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state["torch"].cpu())  # a checkpoint may have been read to another device
    elif hasattr(generator, "setstate"):
        generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    elif hasattr(generator, "set_state"):
        generator.set_state(_decode(state, _numpy_state(generator)))
    else:
        bits = getattr(generator, "bit_generator", generator)
        bits.state = _decode(state, bits.state)


def read_global_states() -> State:
    """Return the states of the global generators of this process that samplers draw from; those of devices are not."""
    return {name: read_state(generator) for name, generator in _global_generators().items()}


def write_global_states(states: State) -> None:
    """Set the global generators to what :func:`read_global_states` has returned."""
    for name, generator in _global_generators().items():
        if name in states:
            write_state(generator, states[name])


def read_random_states(device: torch.device) -> State:
    """Read what a training draws from by default: the global generators, and that of an accelerator in use."""
    states, source = read_global_states(), accelerator_source(device)
    return states if source is None else states | {device.type: source[0]()}


def restore_random_states(states: State, device: torch.device) -> None:
    """Restore the states of :func:`read_random_states`; those of other kinds of devices are left alone."""
    write_global_states(states)
    source = accelerator_source(device)
    if source is not None and device.type in states:
        source[1](states[device.type].cpu())


@contextmanager
def with_global_states(states: State) -> Iterator[None]:
    """Let the global generators start from ``states``; afterwards they go on from where they are now."""
    now = read_global_states()
    try:
        write_global_states(states)
        yield
    finally:
        write_global_states(now)


def _global_generators() -> dict[str, Any]:
    generators: dict[str, Any] = {"torch": torch.default_generator, "python": random}
    if "numpy" in sys.modules:
        generators["numpy"] = sys.modules["numpy"].random
    return generators


def _numpy_state(generator: Any) -> State:
    if hasattr(generator, "get_state"):  # the module, and the elder class
        state: State = generator.get_state(legacy=False)
    else:
        state = getattr(generator, "bit_generator", generator).state
    return state


def _encode(value: Any) -> Any:
    """Turn arrays into tensors; signed ones, since others are rare in torch."""
    if isinstance(value, dict):
        return {name: _encode(part) for name, part in value.items()}
    if getattr(value, "ndim", 0):
        return torch.from_numpy(value.astype("uint64").view("int64"))
    return value


def _decode(value: Any, like: Any) -> Any:
    """Turn tensors into arrays of the kind that the generator has now."""
    if isinstance(value, dict):
        return {name: _decode(part, like.get(name) if isinstance(like, dict) else None) for name, part in value.items()}
    if isinstance(value, Tensor):
        array = value.cpu().numpy().view("uint64")
        return array.astype(like.dtype) if hasattr(like, "dtype") else array
    return value
