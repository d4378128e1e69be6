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


# --- the device ---


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


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


def get_device_name(device: Any = None) -> str:
    return "simulated accelerator"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return 0, 0


def get_device_properties(device: Any = None) -> SimpleNamespace:
    total = extension.settings.capacity
    return SimpleNamespace(name=get_device_name(), total_memory=total, multi_processor_count=1)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


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


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(0)


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


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(0)


def set_sync_debug_mode(mode: int | str) -> None:
    modes = ["default", "warn", "error"]
    extension.settings.sync_debug = modes.index(mode) if isinstance(mode, str) else mode


def get_sync_debug_mode() -> int:
    return extension.settings.sync_debug


# --- memory ---


def memory_stats(device: Any = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(0)


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(0)


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(0)


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory_reserved(0)


def max_memory_reserved(device: Any = None) -> int:
    return torch.accelerator.max_memory_reserved(0)


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(0)


def reset_accumulated_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_accumulated_memory_stats(0)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(0)


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    extension.settings.fraction = fraction


def get_per_process_memory_fraction(device: Any = None) -> float:
    return extension.settings.fraction


# --- random numbers ---


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
