import pytest
import torch

from lightning_vram.memory.device.out_of_memory import FailedRequest, read_failed_request
from lightning_vram.memory.units import GIB, MIB

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


def test_no_process_that_is_too_small_is_this_one():
    request = read_failed_request(IN_CONTAINER.replace("37.00", "60.00"), CPU)
    assert (request.process_bytes, request.other_bytes) == (None, 0)
