"""Memory of the host that a GPU can copy from and to by itself."""

import weakref
from contextlib import suppress

import torch
from torch import Tensor


def make_host_tensor(numel: int, dtype: torch.dtype, *, pin_memory: bool) -> Tensor:
    """Return a flat tensor without values on the host, for as long as training takes.

    PyTorch rounds what it pins to powers of two, up to twice as much (1.78 times measured on a model's parameters), and
    keeps it. So ordinary memory is taken, and CUDA told of it.

    Args:
        numel: Of the tensor.
        dtype: Of the tensor.
        pin_memory: Whether to pin it.
    """
    tensor = torch.empty(numel, dtype=dtype, device="cpu")
    if not pin_memory or not numel:
        return tensor
    if torch.cuda.is_available() and _register(tensor):
        return tensor
    return tensor.pin_memory()


def _register(tensor: Tensor) -> bool:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    if int(runtime.cudaHostRegister(address, tensor.nbytes, 0)) != 0:
        with suppress(RuntimeError):  # CUDA keeps the error for the next kernel, which would be blamed for it
            torch.ones(1, device="cuda")
        return False
    weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address)
    return True
