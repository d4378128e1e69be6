"""Out-of-memory errors in the words of every library, and errors that only sound like one."""

import errno
import weakref

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from lightning_vram.memory.device.out_of_memory import (
    OutOfMemorySource,
    is_out_of_memory,
    path_to_out_of_memory,
    read_out_of_memory,
    release_frames,
)

MESSAGES = [
    (
        OutOfMemorySource.DEVICE,
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.64 GiB",
    ),
    (OutOfMemorySource.DEVICE, "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    (OutOfMemorySource.DEVICE, "[enforce fail at alloc.cpp] cudaErrorMemoryAllocation"),
    (OutOfMemorySource.DEVICE, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (OutOfMemorySource.DEVICE, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    (OutOfMemorySource.DEVICE, "Unable to find a valid cuDNN algorithm to run convolution"),
    (OutOfMemorySource.DEVICE, "cuFFT error: CUFFT_ALLOC_FAILED"),
    (OutOfMemorySource.DEVICE, "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
    (OutOfMemorySource.DEVICE, "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
    (OutOfMemorySource.DEVICE, "NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"),
    (OutOfMemorySource.DEVICE, "CUDA driver error: out of memory"),
    (OutOfMemorySource.DEVICE, "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCGeneral.cpp"),
    (OutOfMemorySource.DEVICE, "Triton Error [CUDA]: out of memory"),
    (OutOfMemorySource.DEVICE, "HIP driver error: out of memory"),
    (OutOfMemorySource.DEVICE, "hipFFT error: HIPFFT_ALLOC_FAILED"),
    (OutOfMemorySource.DEVICE, "Invalid buffer size: 24.00 GiB"),
    (OutOfMemorySource.HOST, "bad allocation"),
    (OutOfMemorySource.HOST, "unable to allocate shared memory(shm) for file </torch_1>: Cannot allocate memory (12)"),
    (OutOfMemorySource.DEVICE, "HIP out of memory. Tried to allocate 256.00 MiB"),
    (OutOfMemorySource.DEVICE, "HIP error: out of memory"),
    (OutOfMemorySource.DEVICE, "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    (OutOfMemorySource.DEVICE, "XPU out of memory. Tried to allocate 2.00 GiB"),
    (OutOfMemorySource.DEVICE, "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    (OutOfMemorySource.DEVICE, "MPS backend out of memory (MPS allocated: 18.00 GB, other allocations: 96.00 KB)"),
    (
        OutOfMemorySource.HOST,
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory",
    ),
    (OutOfMemorySource.HOST, "[enforce fail at alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory"),
    (OutOfMemorySource.HOST, "std::bad_alloc"),
]


@pytest.mark.parametrize(("source", "message"), MESSAGES, ids=[message[:30] for _, message in MESSAGES])
def test_knows_every_library(source, message):
    assert read_out_of_memory(RuntimeError(message)) is source


@pytest.mark.parametrize(
    ("error", "source"),
    [
        (torch.OutOfMemoryError("in words of a version to come"), OutOfMemorySource.DEVICE),
        (torch.OutOfMemoryError("XPU out of memory. Tried to allocate 2.00 GiB"), OutOfMemorySource.DEVICE),
        (MemoryError(), OutOfMemorySource.HOST),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), OutOfMemorySource.HOST),
    ],
)
def test_knows_the_classes(error, source):
    assert read_out_of_memory(error) is source




@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("NCCL timeout; it may be that rank 3 ran out of memory or crashed"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        ValueError("CUDA out of memory is a topic of this text"),
        OSError(errno.ENOENT, "No such file"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not_taken_for_one(error):
    assert not is_out_of_memory(error)






def test_what_failed_while_another_error_was_handled_does_not_count():
    def recover_badly():
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("wrong label")  # noqa: B904

    with pytest.raises(ValueError, match="wrong label") as caught:
        recover_badly()
    assert not is_out_of_memory(caught.value)


def test_a_group_and_a_worker_do_not_hide_it():
    assert is_out_of_memory(ExceptionGroup("step", [ValueError("x"), torch.OutOfMemoryError("CUDA out of memory.")]))
    worker = ProcessRaisedException("-- Process 0 terminated\nCUDA out of memory. Tried to allocate", 0, 1)
    assert read_out_of_memory(worker) is OutOfMemorySource.DEVICE


def test_the_way_to_the_error_that_says_so():
    memory = torch.OutOfMemoryError("CUDA out of memory.")
    memory.__cause__ = RuntimeError("first")
    wrapper = ValueError("step failed")
    wrapper.__cause__ = memory
    group = ExceptionGroup("ranks", [ValueError("x"), wrapper])
    assert path_to_out_of_memory(group) == (group, wrapper, memory)
    assert path_to_out_of_memory(memory) == (memory,)
    assert path_to_out_of_memory(ValueError("x")) == ()




def test_an_error_lets_go_of_what_was_alive_where_it_came_from():
    def fail() -> None:
        tensor = torch.zeros(3)
        alive.append(weakref.ref(tensor))
        try:
            raise ValueError("inner")
        except ValueError as inner:
            raise torch.OutOfMemoryError("CUDA out of memory.") from inner

    alive: list[weakref.ref] = []
    kept = None
    try:
        fail()
    except torch.OutOfMemoryError as error:
        kept = error
    assert alive[0]() is not None
    release_frames(kept)
    assert alive[0]() is None
    assert is_out_of_memory(kept)
    assert str(kept.__cause__) == "inner"
