"""All of it at once: a program for CUDA runs on fake tensors of a stand-in, and takes the memory it takes on a card."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from lightning_vram.memory.estimate.cuda_semantics.autocast.casts import Autocast
from lightning_vram.memory.estimate.cuda_semantics.autocast.state import autocast_of
from lightning_vram.memory.estimate.cuda_semantics.backend import known_backend, optimizers_of_cuda
from lightning_vram.memory.estimate.cuda_semantics.choices import choices
from lightning_vram.memory.estimate.cuda_semantics.convolutions import convolutions_of
from lightning_vram.memory.estimate.cuda_semantics.mode import cuda_devices
from lightning_vram.memory.estimate.cuda_semantics.spec import CudaSpec
from lightning_vram.memory.estimate.cuda_semantics.torch_cuda import torch_cuda
from lightning_vram.private_names.cuda.dispatch_keys import AUTOCAST, BEHIND_AUTOCAST, kernels_at


@contextmanager
def cuda_semantics(spec: CudaSpec, *, allocated_bytes: Callable[[], int] = lambda: 0) -> Iterator[dict[str, None]]:
    """Let fake tensors of the stand-in take what CUDA's kernels take, inside the block and in this thread.

    Yields:
        What the reader of the numbers should know, as keys: more of them as the program runs.

    Raises:
        RuntimeError: If torch does not say what autocast does on CUDA, or inside of another such block.
    """
    kind = spec.stand_in.type
    autocast = Autocast(kind)
    notes: dict[str, None] = {}
    with ExitStack() as stack:
        stack.enter_context(torch_cuda(spec, allocated_bytes=allocated_bytes))
        stack.enter_context(autocast_of(kind, clear_cache=autocast.clear_cache))
        stack.enter_context(kernels_at(AUTOCAST, autocast.kernels()))
        stack.enter_context(kernels_at(BEHIND_AUTOCAST, choices(spec, notes)))
        stack.enter_context(known_backend(kind))
        stack.enter_context(convolutions_of(kind))
        stack.enter_context(optimizers_of_cuda())
        stack.enter_context(cuda_devices(spec.stand_in))
        yield notes
