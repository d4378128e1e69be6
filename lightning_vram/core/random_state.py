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
from lightning_vram.private_names.dispatcher import default_device_of_block
from lightning_vram.private_names.torch import read_flags, write_flags

Source = tuple[Callable[[], Any], Callable[[Any], object]]  # how to read the state of a generator, and how to set it
State = dict[str, Any]  # of tensors, numbers, strings, ``None``, lists and dictionaries
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


def _source_of_torch(generator: torch.Generator) -> Source:
    return generator.get_state, generator.set_state


def source_of(value: Any) -> Source | None:
    """Return the source of a generator that an object may own; ``None`` for anything else."""
    kind: Any = type(value)
    if kind is _TorchGenerator:
        return _source_of_torch(value)
    if kind is random.Random:
        return value.getstate, value.setstate
    if not kind.__module__.startswith("numpy.random"):
        return None
    if kind.__name__ == "RandomState":
        return partial(value.get_state, legacy=False), value.set_state
    bits = value.bit_generator if kind.__name__ == "Generator" else None
    return None if bits is None else (lambda: bits.state, lambda state: setattr(bits, "state", state))


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
    return _encode(_numpy_state(generator))  # type: ignore[no-any-return]


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


def _numpy_state(generator: Any) -> Any:
    if hasattr(generator, "get_state"):  # the module, and the elder class
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


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


_T = TypeVar("_T")
_HOST = torch.device("cpu")
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
        self._default_device = default_device_of_block()
        self._flags = read_flags()
        self._context = copy_context()
        sources = filter(None, map(default_source, devices - {torch.device("meta")}))
        self._generators = [(read, write, read()) for read, write in sources]
        self._hosts = [(read, write, read()) for read, write in host_sources()[: None if has_numpy else 1]]

    def settle(self) -> set[str]:
        """Drop unchanged states of Python's and NumPy's generators; return the changed: ``"python"``, ``"numpy"``."""
        self._hosts = [one for one in self._hosts if differs(one[2], one[0]())]
        return {"python" if write is random.setstate else "numpy" for _, write, _ in self._hosts}

    def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of ``work`` in this state; generators go on afterwards from where they are now."""
        # A copy: a context can be entered once at a time, and a graph that is retained is recomputed again.
        return self._context.copy().run(self._run, work)

    def _run(self, work: Callable[[], _T]) -> _T:
        with ExitStack() as stack:
            for read, write, state in (*self._generators, *self._hosts):
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
            if default_device_of_block() != self._default_device:
                stack.enter_context(self._default_device or _HOST)
            return work()


def _read_autocast(kind: str) -> _Autocast:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
