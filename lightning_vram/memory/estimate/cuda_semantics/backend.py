"""A kind of device that torch thinks has the kernels that CUDA has; fake parameters that it steps as real ones."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_vram.memory.estimate.fakes.parameters import taken_together
from lightning_vram.memory.estimate.replaced import replaced
from lightning_vram.private_names.cuda.backends import BACKEND_NAMES, INITIALISATION
from lightning_vram.private_names.torch.autocast import STEP_IF_FINITE, first_scale_of


@contextmanager
def known_backend(kind: str) -> Iterator[None]:
    """Let ``kind`` be the device that an extension of torch adds, inside the block.

    Torch takes such a device for one that can all that CUDA can: many parameters at once and fused steps, the fast
    paths of attention and encoder layers, the norms of ``torch.norm``, synchronised batch norms.
    """
    with ExitStack() as stack:
        for owner, name, is_function in BACKEND_NAMES:
            stack.enter_context(replaced(owner, {name: (lambda: kind) if is_function else kind}))
        mode, name = INITIALISATION
        stack.enter_context(replaced(mode, {name: True}))  # or it would compute small constants there
        yield


@contextmanager
def optimizers_of_cuda() -> Iterator[None]:
    """Let fake parameters be stepped as real ones, inside the block; a scaled step finds no infinite gradient."""
    with ExitStack() as stack:
        stack.enter_context(taken_together())
        stack.enter_context(replaced(GradScaler, {STEP_IF_FINITE: _step, "get_scale": first_scale_of}))
        yield


def _step(self: Any, optimizer: Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
    return optimizer.step(*args, **kwargs)
