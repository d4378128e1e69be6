"""``torch.cuda`` where there is no CUDA, for programs that call it by name: what does no harm, and nothing else.

The rest of it stays as it is, and says that there is no CUDA.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from lightning_vram.memory.estimate.cuda_semantics.replacing import replaced
from lightning_vram.memory.estimate.cuda_semantics.spec import CudaSpec

_NOTHING = (
    *("synchronize", "empty_cache", "ipc_collect", "init", "set_device", "set_per_process_memory_fraction"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats"),
)
_BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


@contextmanager
def torch_cuda(spec: CudaSpec, *, allocated_bytes: Callable[[], int]) -> Iterator[None]:
    """Let ``torch.cuda`` speak of the card that is not there, inside the block.

    Args:
        spec: The card.
        allocated_bytes: Tells what is in tensors on it now.
    """
    with replaced(torch.cuda, _functions(spec, allocated_bytes)):
        yield


def _functions(spec: CudaSpec, allocated_bytes: Callable[[], int]) -> dict[str, Any]:
    major, minor = spec.compute_capability
    properties = SimpleNamespace(
        name="", major=major, minor=minor, total_memory=spec.num_bytes, multi_processor_count=1, warp_size=32
    )
    stream = _Stream()
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or spec.has_bfloat16,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda *_: nullcontext(),
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: spec.compute_capability,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (max(0, spec.num_bytes - allocated_bytes()), spec.num_bytes),
        "get_rng_state": lambda *_: torch.default_generator.get_state(),
        "get_rng_state_all": lambda: [torch.default_generator.get_state()],
        "initial_seed": torch.initial_seed,
        "memory_stats": lambda *_: {},
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda *_: nullcontext(),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
    }
    functions |= {name: lambda *_, **__: None for name in _NOTHING}
    return functions | {name: lambda *_: allocated_bytes() for name in _BYTES}


class _Stream:
    """A stream, or an event on one, that has always done what it was given."""

    device_index = cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    synchronize = wait_stream = wait_event = wait = record = _nothing

    def record_event(self, event: Any = None) -> Any:
        """The event, or a new one."""
        return event or _Stream()

    def query(self) -> bool:
        """All is done."""
        return True

    def is_capturing(self) -> bool:
        """No graph is captured."""
        return False

    def elapsed_time(self, _: Any) -> float:
        """No time."""
        return 0.0
