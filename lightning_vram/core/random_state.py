"""Read, write and compare random generators, and the state around a forward. May import: core.tensors, memory."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_vram.core.tensors.properties import flatten_arguments
from lightning_vram.private_names.torch import read_flags, write_flags

Source = tuple[Callable[[], Any], Callable[[Any], object]]  # how to read the state of a generator, and how to set it
State = Any  # of tensors, numbers, strings, ``None``, lists, tuples and dictionaries
_HOST = torch.device("cpu")


def global_sources(device: torch.device = _HOST) -> dict[str, Source]:
    """Return what a step on ``device`` draws from by default, by name: ``"python"``, ``"torch"``, ``"numpy"``, ..."""
    sources: dict[str, Source] = {"python": (random.getstate, random.setstate), "torch": _torch_source()}
    numpy = sys.modules.get("numpy")  # torch works without it
    if numpy is not None:
        sources["numpy"] = partial(numpy.random.get_state, legacy=False), numpy.random.set_state
    accelerator = accelerator_source(device)
    return sources if accelerator is None else sources | {device.type: accelerator}


def default_source(device: torch.device) -> Source | None:
    """Return the generator that operators on ``device`` draw from; ``None`` if the device has none that can be set."""
    return _torch_source() if _is_host(device) else accelerator_source(device)


def accelerator_source(device: torch.device) -> Source | None:
    """Return the generator of an accelerator in use; ``None`` for the host, and for others."""
    if _is_host(device):
        return None
    module: Any = torch.get_device_module(device)
    is_settable = hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")
    if not is_settable or not getattr(module, "is_initialized", lambda: True)():
        return None
    arguments = () if device.type == "mps" else (device,)  # has one device and takes no name for it
    return partial(module.get_rng_state, *arguments), lambda state: module.set_rng_state(state, *arguments)


def find_sources(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Source]:
    """Return the generators that a call may draw from: none, for operators of torch that never draw."""
    is_of_torch = getattr(func, "namespace", "") == "aten"
    if is_of_torch and torch.Tag.nondeterministic_seeded not in func.tags:
        return []
    leaves = flatten_arguments((args, kwargs))[0]
    devices = {leaf.device if isinstance(leaf, Tensor) else leaf for leaf in leaves}
    accelerators = (accelerator_source(device) for device in devices if isinstance(device, torch.device))
    given = (source_of(leaf) for leaf in leaves if isinstance(leaf, torch.Generator))
    others = [source for source in (*given, *accelerators) if source is not None]
    return [*([_torch_source()] if is_of_torch else global_sources().values()), *others]


def differs(one: Any, other: Any) -> bool:
    """Whether two states of one generator differ."""
    if type(one) is tuple:  # Python's: a draw moves the position, the last word, or makes all words anew
        one, other = (one[1][-9:], one[2]), (other[1][-9:], other[2])
    return not torch.equal(one, other) if isinstance(one, Tensor) else bool(_encode(one) != _encode(other))


def _is_host(device: torch.device) -> bool:
    return device.type in ("cpu", "meta")


def _torch_source() -> Source:
    return torch.default_generator.get_state, torch.default_generator.set_state


def source_of(value: Any) -> Source | None:
    """Return the source of a generator of torch, Python or NumPy that an object may own; ``None`` for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if getattr(type(value), "getstate", None) is random.Random.getstate:  # not SystemRandom, which has no state
        return value.getstate, value.setstate
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return partial(value.get_state, legacy=False), value.set_state
    bits: Any = value.bit_generator if isinstance(value, numpy.random.Generator) else value
    if not isinstance(bits, numpy.random.BitGenerator):
        return None
    return (lambda: bits.state), (lambda state: setattr(bits, "state", state))


def read_state(generator: Any) -> State:
    """Return the state of a generator of :func:`source_of`, as a copy that can be saved and loaded safely."""
    source = source_of(generator)
    assert source is not None
    return _encode(source[0]())


def write_state(generator: Any, state: State) -> None:
    """Set the state of a generator to what :func:`read_state` has returned for one of its kind."""
    source = source_of(generator)
    assert source is not None
    _write(source, state)


def read_global_states(device: torch.device = _HOST) -> dict[str, State]:
    """Return the states of :func:`global_sources`, by name."""
    return {name: _encode(read()) for name, (read, _) in global_sources(device).items()}


def write_global_states(states: dict[str, State], device: torch.device = _HOST) -> None:
    """Set global generators to what :func:`read_global_states` has returned; those that it has not stay."""
    for name, source in global_sources(device).items():
        if name in states:
            _write(source, states[name])


@contextmanager
def with_global_states(states: dict[str, State]) -> Iterator[None]:
    """Let the global generators start from ``states``; afterwards they go on from where they are now."""
    now = read_global_states()
    try:
        write_global_states(states)
        yield
    finally:
        write_global_states(now)


def _write(source: Source, state: State) -> None:
    source[1](state.cpu() if isinstance(state, Tensor) else state)  # a checkpoint may have been read to a device


def _encode(state: Any) -> State:
    """Turn NumPy's arrays into lists, which it takes as well."""
    if isinstance(state, dict):
        return {name: _encode(part) for name, part in state.items()}
    return state.tolist() if getattr(state, "ndim", 0) and not isinstance(state, Tensor) else state


_T = TypeVar("_T")
_Autocast = tuple[bool, torch.dtype, bool]
_can_autocast = cache(torch.amp.is_autocast_available)


class AmbientState:
    """Random generators, autocast, default dtype and device, backends and context variables at the time it is made.

    ``devices``: those of the forward, in addition to the host. ``has_numpy``: whether NumPy's slow state counts.
    """

    def __init__(self, devices: set[torch.device], *, has_numpy: bool = True) -> None:
        devices.add(_HOST)
        kinds = {device.type for device in devices}
        self._autocasts = {kind: _read_autocast(kind) for kind in kinds if _can_autocast(kind)}
        self._default_device = torch.get_default_device()
        self._flags = read_flags()
        self._context = copy_context()
        sources = filter(None, map(default_source, devices - {torch.device("meta")}))
        self._generators = [(read, write, read()) for read, write in sources]
        self._hosts = {
            name: (read, write, read())
            for name, (read, write) in global_sources().items()
            if name == "python" or (name == "numpy" and has_numpy)
        }

    def settle(self) -> set[str]:
        """Drop unchanged states of Python's and NumPy's generators; return the changed: ``"python"``, ``"numpy"``."""
        self._hosts = {name: one for name, one in self._hosts.items() if differs(one[2], one[0]())}
        return set(self._hosts)

    def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of ``work`` in this state; generators go on afterwards from where they are now."""
        # A copy: a context can be entered once at a time, and a graph that is retained is recomputed again.
        return self._context.copy().run(self._run, work)

    def _run(self, work: Callable[[], _T]) -> _T:
        with ExitStack() as stack:
            for read, write, state in (*self._generators, *self._hosts.values()):
                stack.callback(write, read())
                write(state)
            flags = read_flags()
            if flags != self._flags:
                stack.callback(write_flags, flags)
                write_flags(self._flags)
            for kind, then in self._autocasts.items():
                if then != _read_autocast(kind):
                    is_enabled, dtype, has_cache = then
                    stack.enter_context(torch.autocast(kind, dtype, is_enabled, has_cache))
            if torch.get_default_device() != self._default_device:
                stack.enter_context(self._default_device)
            return work()


def _read_autocast(kind: str) -> _Autocast:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
