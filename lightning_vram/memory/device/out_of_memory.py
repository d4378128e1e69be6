"""Tell an out-of-memory error from any other, whichever library ran out."""

import errno
import re
from collections.abc import Iterator
from enum import StrEnum

import torch
from torch.multiprocessing.spawn import ProcessRaisedException


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
    (OutOfMemorySource.NCCL, r"nccl[^\n]*(error|failure)[^\n]*'out of memory'"),
    (OutOfMemorySource.CUBLAS, r"CUBLAS_STATUS_ALLOC_FAILED"),
    (OutOfMemorySource.CUDNN, r"CUDNN_STATUS_ALLOC_FAILED"),
    (OutOfMemorySource.CUDNN, r"CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED"),
    # cuDNN tries its algorithms in turn; where none got its workspace, this is all that is left of the reason.
    (OutOfMemorySource.CUDNN, r"Unable to find a valid cuDNN algorithm to run convolution"),
    (OutOfMemorySource.CUFFT, r"CUFFT_ALLOC_FAILED"),
    (OutOfMemorySource.CUSOLVER, r"CUSOLVER_STATUS_ALLOC_FAILED"),
    (OutOfMemorySource.CUSPARSE, r"CUSPARSE_STATUS_ALLOC_FAILED|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"),
    (OutOfMemorySource.HIP, r"HIP out of memory|HIP (driver )?error: out of memory|hipErrorOutOfMemory"),
    (OutOfMemorySource.HIP, r"HIP(BLAS|FFT|SOLVER|SPARSE)_(STATUS_)?ALLOC_FAILED"),
    (OutOfMemorySource.HIP, r"rocblas_status_memory_error|miopenStatusAllocFailed"),
    (OutOfMemorySource.XPU, r"XPU out of memory|(UR_RESULT|PI)_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)"),
    (OutOfMemorySource.MPS, r"MPS backend out of memory|Invalid buffer size: [\d.]+ [GT]i?B"),
    (OutOfMemorySource.CUDA, r"CUDA out of memory|CUDA (driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"),
    (OutOfMemorySource.CUDA, r"cuda runtime error \(2\) : out of memory|Triton Error \[CUDA\]: out of memory"),
    (OutOfMemorySource.CUDA, r"cudaErrorMemoryAllocation"),
    (OutOfMemorySource.CPU, r"DefaultCPUAllocator: (can't allocate|not enough) memory"),
    (OutOfMemorySource.CPU, r"unable to (mmap|allocate shared memory)[^\n]* Cannot allocate memory"),
    (OutOfMemorySource.CPU, r"std::bad_alloc|bad allocation|Couldn't open shared file mapping[^\n]*<1455>"),
)
_PATTERNS = tuple((source, re.compile(message, re.IGNORECASE)) for source, message in _MESSAGES)


def read_out_of_memory(error: BaseException) -> OutOfMemorySource | None:
    """Find out whether ``error`` means that memory ran out, and whose.

    Follows the causes of an error (``raise ... from``), groups, and errors of spawned workers, so that a wrapper does
    not hide it. An error that merely happened while another was handled does not count.

    Example:
        >>> read_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
        <OutOfMemorySource.CUBLAS: 'cublas'>
        >>> read_out_of_memory(RuntimeError("shape mismatch")) is None
        True
    """
    path = path_to_out_of_memory(error)
    return _read_one(path[-1]) if path else None


def path_to_out_of_memory(error: BaseException) -> tuple[BaseException, ...]:
    """Return the errors from ``error``, the outermost, to the one that says that memory ran out; empty if none does."""
    return next((path for path in _paths(error) if _read_one(path[-1]) is not None), ())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that memory ran out, on the device or on the host: see :func:`read_out_of_memory`."""
    return read_out_of_memory(error) is not None


def release_frames(error: BaseException) -> None:
    """Drop the tracebacks of ``error`` and its causes, and with them all tensors that were alive in their frames."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.__traceback__ = None
        waiting += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]


def _paths(error: BaseException, above: tuple[BaseException, ...] = ()) -> Iterator[tuple[BaseException, ...]]:
    link: BaseException | None = error
    while link is not None and all(link is not other for other in above):
        above = (*above, link)
        yield above
        if isinstance(link, BaseExceptionGroup):
            for member in link.exceptions:
                yield from _paths(member, above)
        link = link.__cause__


def _read_one(error: BaseException) -> OutOfMemorySource | None:
    if isinstance(error, MemoryError):
        return OutOfMemorySource.CPU
    if isinstance(error, OSError):
        return OutOfMemorySource.CPU if error.errno == errno.ENOMEM else None
    if not isinstance(error, RuntimeError | ProcessRaisedException):  # the latter holds a worker's traceback as text
        return None
    message = str(error)
    found = next((source for source, pattern in _PATTERNS if pattern.search(message)), None)
    if found is None and isinstance(error, torch.OutOfMemoryError):
        return OutOfMemorySource.CUDA  # the class is enough, whatever a future version writes in it
    return found
