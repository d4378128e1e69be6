"""``torch.sim``: what ``torch.cuda`` is for CUDA, as far as PyTorch, Lightning and the package ask for it."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from support.simdevice.extension import extension
from support.simdevice.settings import clear_races, pending, races, settings

__all__ = ["clear_races", "pending", "races", "settings"]

_initialized = True  # torch.utils.checkpoint asks for it before it keeps the state of the generator
default_generators = (extension.default_generator(),)
host_register = extension.host_register
host_unregister = extension.host_unregister
host_memory_stats = extension.host_memory_stats
reset_peak_host_memory_stats = extension.reset_peak_host_memory_stats
empty_host_cache = extension.empty_host_cache


def _check(device: Any) -> None:
    if device is not None and not isinstance(device, int) and torch.device(device).type != "sim":
        raise ValueError(f"Expected a sim device, but got: {device}")


def _answer(value: Any) -> Any:
    return lambda *arguments, **options: value


is_available = is_initialized = is_bf16_supported = _answer(True)
init = _lazy_init = _answer(None)
_is_in_bad_fork = _answer(False)
device_count = _answer(1)
current_device = _answer(0)
get_device_name = _answer("simulated accelerator")
get_device_capability = _answer((0, 0))
get_amp_supported_dtype = _answer([torch.float16, torch.bfloat16])


def set_device(device: Any) -> None:
    _check(device)


class device:  # noqa: N801 - as torch.cuda.device
    """Does nothing: there is one device."""

    def __init__(self, device: Any = None):
        _check(device)
        self.idx = 0

    def __enter__(self) -> "device":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


device_of = device


def get_device_properties(device: Any = None) -> SimpleNamespace:
    total = extension.settings.capacity
    return SimpleNamespace(name=get_device_name(), total_memory=total, multi_processor_count=1)


# --- streams ---


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        _check(device)
        return super().__new__(cls, device=torch.device("sim", 0), priority=priority, **kwargs)


class Event(torch.Event):
    """An event of the device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        # Not of this class: its elapsed_time() takes no other.
        return torch.Event(device=torch.device("sim", 0), enable_timing=enable_timing)


def default_stream(device: Any = None) -> torch.Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1
    return torch.Stream(stream_id=0, device_index=0, device_type=int(kind))


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


StreamContext = stream


def set_sync_debug_mode(mode: int | str) -> None:
    modes = ["default", "warn", "error"]
    extension.settings.sync_debug = modes.index(mode) if isinstance(mode, str) else mode


def get_sync_debug_mode() -> int:
    return extension.settings.sync_debug


# --- memory ---


def _of_accelerator(name: str) -> Any:
    return lambda device=None: getattr(torch.accelerator, name)(0)


current_stream = _of_accelerator("current_stream")
synchronize = _of_accelerator("synchronize")
memory_stats = _of_accelerator("memory_stats")
memory_allocated = _of_accelerator("memory_allocated")
max_memory_allocated = _of_accelerator("max_memory_allocated")
memory_reserved = _of_accelerator("memory_reserved")
max_memory_reserved = _of_accelerator("max_memory_reserved")
reset_peak_memory_stats = _of_accelerator("reset_peak_memory_stats")
reset_accumulated_memory_stats = _of_accelerator("reset_accumulated_memory_stats")
mem_get_info = _of_accelerator("get_memory_info")
empty_cache = torch.accelerator.empty_cache


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    extension.settings.fraction = fraction


def get_per_process_memory_fraction(device: Any = None) -> float:
    return extension.settings.fraction


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    return default_generators[0].get_state()


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    default_generators[0].set_state(state.cpu())


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    set_rng_state(states[0])


def manual_seed(seed: int) -> None:
    default_generators[0].manual_seed(int(seed))


manual_seed_all = manual_seed


def seed() -> None:
    default_generators[0].seed()


seed_all = seed


def initial_seed() -> int:
    return default_generators[0].initial_seed()
