"""Gradients that nobody needs: those of the last step, and those without an optimizer."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.memory.tracking.storages import iterate_storages
from lightning_vram.private_names.torch.tensors import storage_key


def gradient_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes that gradients of ``parameters`` hold: those of their storages, each counted once."""
    return sum(storage_sizes(parameter.grad for parameter in parameters if parameter.grad is not None).values())


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of ``tensors``."""
    storages = [storage for tensor in tensors for storage, _ in iterate_storages(tensor)]
    return {storage_key(storage): storage.nbytes() for storage in storages}


def unstepped_gradients(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Return the parameters, by name, that have a gradient and no optimizer.

    A frozen teacher that runs in evaluation mode, but not under ``torch.no_grad()``, has such: the graph of its forward
    is kept for them, and no ``optimizer.zero_grad`` frees them.
    """
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and id(parameter) not in stepped
    }
