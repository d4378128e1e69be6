"""Out-of-memory errors in the words of every library, what they tell, and errors that only sound like one."""

import errno
import pickle
import weakref

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from lightning_vram.memory.device import out_of_memory
from lightning_vram.memory.device.out_of_memory import (
    FailedRequest,
    OutOfMemorySource,
    is_out_of_memory,
    path_to_out_of_memory,
    read_failed_request,
    read_out_of_memory,
    release_frames,
    write_snapshot,
)
from lightning_vram.memory.units import GIB, MIB

DEVICE_MESSAGES = [
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.64 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "[enforce fail at alloc.cpp] cudaErrorMemoryAllocation",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'",
    "CUDA driver error: out of memory",
    "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCGeneral.cpp",
    "Triton Error [CUDA]: out of memory",
    "HIP driver error: out of memory",
    "hipFFT error: HIPFFT_ALLOC_FAILED",
    "Invalid buffer size: 24.00 GiB",
    "HIP out of memory. Tried to allocate 256.00 MiB",
    "HIP error: out of memory",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "XPU out of memory. Tried to allocate 2.00 GiB",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "MPS backend out of memory (MPS allocated: 18.00 GB, other allocations: 96.00 KB)",
]
HOST_MESSAGES = [
    "bad allocation",
    "unable to allocate shared memory(shm) for file </torch_1>: Cannot allocate memory (12)",
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory",
    "[enforce fail at alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
]


def test_knows_every_library():
    for source, messages in ((OutOfMemorySource.DEVICE, DEVICE_MESSAGES), (OutOfMemorySource.HOST, HOST_MESSAGES)):
        assert {message: read_out_of_memory(RuntimeError(message)) for message in messages} == dict.fromkeys(
            messages, source
        )


@pytest.mark.parametrize(
    ("error", "source"),
    [
        (torch.OutOfMemoryError("in words of a version to come"), OutOfMemorySource.DEVICE),
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
        ValueError("CUDA out of memory is a topic of this text"),
        OSError(errno.ENOENT, "No such file"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not_taken_for_one(error):
    assert not is_out_of_memory(error)


def test_what_failed_while_another_error_was_handled_does_not_count():
    error = ValueError("wrong label")
    error.__context__ = MemoryError()
    assert not is_out_of_memory(error)


def test_a_worker_does_not_hide_it():
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
    assert is_out_of_memory(group)
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


CPU = torch.device("cpu")
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is "
    "free. Process 4711 has 9.00 GiB memory in use. Including non-PyTorch memory, this process has 70.00 GiB memory in "
    "use. 60.00 GiB allowed; Of the allocated memory 50.00 GiB is allocated by PyTorch, with 0 bytes allocated in "
    "private pools, and 19.50 GiB is reserved by PyTorch but unallocated."
)


def test_all_that_cuda_says_is_read():
    request = read_failed_request(CUDA, CPU)
    assert request == FailedRequest(2 * GIB, 80 * GIB, 1 * GIB, 70 * GIB, 60 * GIB, 50 * GIB, 19 * GIB + 512 * MIB)
    assert (request.other_bytes, request.driver_bytes, request.room_bytes) == (9 * GIB, 512 * MIB, 60 * GIB)


def test_room_is_what_others_and_the_driver_leave():
    request = read_failed_request(CUDA.replace("60.00 GiB allowed; ", ""), CPU)
    assert request.room_bytes == 80 * GIB - 9 * GIB - 512 * MIB


@pytest.mark.parametrize(
    ("message", "asked_bytes"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("XPU out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 64.00 GiB.", 20 * MIB),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None),
    ],
)
def test_what_others_say(message, asked_bytes):
    request = read_failed_request(message, CPU)
    assert request.asked_bytes == asked_bytes
    assert (request.other_bytes, request.driver_bytes) == (0, 0)
    assert (request.room_bytes is None) == ("capacity" not in message)


IN_CONTAINER = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 2.00 GiB is "
    "free. Process 111 has 40.00 GiB memory in use. Process 222 has 38.00 GiB memory in use. Of the allocated memory "
    "37.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)


def test_this_process_is_found_where_its_number_is_another_one():
    request = read_failed_request(IN_CONTAINER, CPU)
    assert (request.process_bytes, request.other_bytes) == (38 * GIB, 40 * GIB)
    assert request.room_bytes == 80 * GIB - 40 * GIB - 512 * MIB
    alone = read_failed_request(IN_CONTAINER.replace("Process 111 has 40.00 GiB memory in use. ", ""), CPU)
    assert (alone.process_bytes, alone.other_bytes) == (38 * GIB, 40 * GIB)  # of one that is not listed


def test_the_blocks_of_the_allocator_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(out_of_memory, "read_snapshot", lambda kind: {"segments": [{"address": 64}]})
    assert write_snapshot(tmp_path / "out.pickle", "cuda")
    assert pickle.loads((tmp_path / "out.pickle").read_bytes()) == {"segments": [{"address": 64}]}


def test_without_cuda_there_is_none(tmp_path):
    if not torch.cuda.is_initialized():
        assert not write_snapshot(tmp_path / "out.pickle", "cuda")
        assert not (tmp_path / "out.pickle").exists()
