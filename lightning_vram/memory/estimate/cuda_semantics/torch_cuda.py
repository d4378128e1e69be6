"""``torch.cuda`` where there is no CUDA, for programs that call it by name: what does no harm, and nothing else.

The rest of it stays as it is, and says that there is no CUDA.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from lightning_vram.memory.estimate.cuda_semantics.spec import CudaSpec
from lightning_vram.memory.estimate.fakes.device_module import device_functions
from lightning_vram.memory.estimate.replaced import replaced

_NOTHING = (
    *("ipc_collect", "init", "set_per_process_memory_fraction", "seed", "seed_all", "set_rng_state_all"),
    *("reset_max_memory_allocated", "reset_accumulated_memory_stats"),
)


@contextmanager
def torch_cuda(spec: CudaSpec, *, allocated_bytes: Callable[[], int]) -> Iterator[None]:
    """Let ``torch.cuda`` speak of the card that is not there, inside the block."""
    with replaced(torch.cuda, _functions(spec, allocated_bytes)):
        yield


def _functions(spec: CudaSpec, allocated_bytes: Callable[[], int]) -> dict[str, Any]:
    major, minor = spec.compute_capability
    properties = SimpleNamespace(
        name="", major=major, minor=minor, total_memory=spec.num_bytes, multi_processor_count=1, warp_size=32
    )
    functions: dict[str, Any] = {
        "is_bf16_supported": lambda including_emulation=True: including_emulation or spec.has_bfloat16,
        "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: spec.compute_capability,
        "get_device_properties": lambda *_: properties,
        "get_rng_state_all": lambda: [torch.default_generator.get_state()],
        "initial_seed": torch.initial_seed,
        "memory_stats": lambda *_: {},
    }
    functions |= {name: lambda *_, **__: None for name in _NOTHING}
    return functions | device_functions(spec.num_bytes, allocated_bytes)
