"""Tell an out-of-memory error from any other, whichever library ran out.

Not every allocation goes through PyTorch's allocator: cuBLAS, cuDNN and cuFFT take workspaces of their own and fail
with their own status codes, and each backend words its message differently. Code that retries on out-of-memory must
know them all, or it dies on the one it does not know.
"""

import errno
import re
from collections.abc import Iterator
from enum import StrEnum

import torch


class OutOfMemorySource(StrEnum):
    """Who ran out of memory."""

    CUDA = "cuda"
    CUBLAS = "cublas"
    CUDNN = "cudnn"
    CUFFT = "cufft"
    CUSOLVER = "cusolver"
    CUSPARSE = "cusparse"
    NCCL = "nccl"
    HIP = "hip"
    XPU = "xpu"
    MPS = "mps"
    CPU = "cpu"


# Matched against RuntimeErrors, first match wins: libraries before devices, since their messages may name both.
_MESSAGES: tuple[tuple[OutOfMemorySource, str], ...] = (
    (OutOfMemorySource.NCCL, r"nccl.*out of memory"),
    (OutOfMemorySource.CUBLAS, r"CUBLAS_STATUS_ALLOC_FAILED"),
    (OutOfMemorySource.CUDNN, r"CUDNN_STATUS_ALLOC_FAILED"),
    (OutOfMemorySource.CUDNN, r"CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED"),
    # cuDNN tries its algorithms in turn; where none got its workspace, this is all that is left of the reason.
    (OutOfMemorySource.CUDNN, r"Unable to find a valid cuDNN algorithm to run convolution"),
    (OutOfMemorySource.CUFFT, r"CUFFT_ALLOC_FAILED"),
    (OutOfMemorySource.CUSOLVER, r"CUSOLVER_STATUS_ALLOC_FAILED"),
    (OutOfMemorySource.CUSPARSE, r"CUSPARSE_STATUS_ALLOC_FAILED|insufficient resources.*cusparse"),
    (OutOfMemorySource.HIP, r"HIP out of memory|HIP error: out of memory|hipErrorOutOfMemory"),
    (OutOfMemorySource.HIP, r"rocblas_status_memory_error|HIPBLAS_STATUS_ALLOC_FAILED|miopenStatusAllocFailed"),
    (OutOfMemorySource.XPU, r"XPU out of memory|UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)"),
    (OutOfMemorySource.MPS, r"MPS backend out of memory|MPS.*Failed to allocate private MTLBuffer"),
    (OutOfMemorySource.CUDA, r"CUDA out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"),
    (OutOfMemorySource.CUDA, r"cudaErrorMemoryAllocation"),
    (OutOfMemorySource.CPU, r"DefaultCPUAllocator: (can't allocate|not enough) memory"),
    (OutOfMemorySource.CPU, r"unable to mmap .* Cannot allocate memory|std::bad_alloc"),
)
_PATTERNS = tuple((source, re.compile(message, re.IGNORECASE | re.DOTALL)) for source, message in _MESSAGES)


def read_out_of_memory(error: BaseException) -> OutOfMemorySource | None:
    """Find out whether ``error`` means that memory ran out, and whose.

    Follows the causes of an error, so that a wrapper (a compiler, a worker, a framework) does not hide it. An error
    that merely happened while another was handled (``__context__``) counts only where the wrapper shows it.

    Args:
        error: Any exception. Only :class:`RuntimeError`, :class:`MemoryError` and :class:`OSError` can match:
            a ``ValueError`` whose text speaks of memory is not the machine's word.

    Returns:
        Who ran out, or ``None`` if the error is about something else.

    Example:
        >>> read_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
        <OutOfMemorySource.CUBLAS: 'cublas'>
        >>> read_out_of_memory(RuntimeError("shape mismatch")) is None
        True
    """
    return next((source for link in _chain(error) if (source := _read_one(link)) is not None), None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that memory ran out, on the device or on the host: see :func:`read_out_of_memory`."""
    return read_out_of_memory(error) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _read_one(error: BaseException) -> OutOfMemorySource | None:
    if isinstance(error, MemoryError):
        return OutOfMemorySource.CPU
    if isinstance(error, OSError):
        return OutOfMemorySource.CPU if error.errno == errno.ENOMEM else None
    if not isinstance(error, RuntimeError):
        return None
    message = str(error)
    found = next((source for source, pattern in _PATTERNS if pattern.search(message)), None)
    if found is None and isinstance(error, torch.OutOfMemoryError):
        return OutOfMemorySource.CUDA  # the class is enough, whatever a future version writes in it
    return found
