"""What the simulated allocator counts, by programs worked out by hand."""

import pytest
import torch

pytestmark = pytest.mark.sim
MIB = 2**20


def make(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8, device="sim")


def stat(name):
    return torch.sim.memory_stats()[name]


@pytest.fixture
def base():
    torch.sim.reset_peak_memory_stats()
    torch.sim.reset_accumulated_memory_stats()
    return torch.sim.memory_allocated(), torch.sim.memory_reserved()


def test_sizes_are_rounded_up_to_512_bytes_and_what_was_asked_for_is_counted_too(base):
    requested = stat("requested_bytes.all.current")
    tensors = [make(1), make(512), make(513), make(0)]
    assert torch.sim.memory_allocated() - base[0] == 512 + 512 + 1024
    assert stat("requested_bytes.all.current") - requested == 1 + 512 + 513
    assert stat("allocation.all.current") >= len(tensors) - 1  # nothing is allocated for nothing


def test_freed_memory_stays_reserved_until_the_cache_is_emptied(base):
    first, second = make(MIB), make(2 * MIB)
    del first
    assert torch.sim.memory_allocated() - base[0] == 2 * MIB
    assert torch.sim.max_memory_allocated() - base[0] == 3 * MIB
    assert torch.sim.memory_reserved() - base[1] == 3 * MIB
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() - base[1] == 2 * MIB
    assert torch.sim.max_memory_reserved() - base[1] == 3 * MIB
    torch.sim.reset_peak_memory_stats()
    assert torch.sim.max_memory_allocated() - base[0] == second.nbytes
    assert torch.sim.max_memory_reserved() - base[1] == second.nbytes


def test_memory_that_another_stream_still_copies_is_active_and_nobody_gets_it(base):
    active = stat("active_bytes.all.current")
    source, target = torch.ones(MIB // 4, device="sim"), torch.empty(MIB // 4, pin_memory=True)
    side = torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        target.copy_(source, non_blocking=True)
    source.record_stream(side)
    address = source.data_ptr()
    del source
    assert torch.sim.memory_allocated() == base[0]
    assert stat("active_bytes.all.current") - active == MIB
    other = make(MIB)
    assert other.data_ptr() != address
    side.synchronize()
    again = make(MIB)
    assert again.data_ptr() == address
    assert stat("active_bytes.all.current") - active == 2 * MIB


def test_out_of_memory_is_an_error_in_the_words_of_cuda_and_counted(base):
    kept = make(MIB)
    with torch.sim.settings(capacity=base[1] + 2 * MIB), pytest.raises(torch.OutOfMemoryError) as caught:
        make(MIB + 1)
    assert str(caught.value).startswith("SIM out of memory. Tried to allocate 1.00 MiB. GPU 0 has a total capacity of")
    assert stat("num_ooms") == 1
    assert stat("num_alloc_retries") == 1
    assert torch.sim.memory_allocated() - base[0] == kept.nbytes


def test_pinned_memory_is_rounded_to_powers_of_two_and_cached():
    torch.sim.empty_host_cache()
    before = torch.sim.host_memory_stats()
    tensor = torch.empty(1000, dtype=torch.uint8, pin_memory=True)
    address = tensor.data_ptr()
    now = torch.sim.host_memory_stats()
    assert tensor.is_pinned()
    assert now["active_bytes.current"] - before["active_bytes.current"] == 1024
    del tensor
    now = torch.sim.host_memory_stats()
    assert now["active_bytes.current"] == before["active_bytes.current"]
    assert now["allocated_bytes.current"] - before["allocated_bytes.current"] == 1024
    assert torch.empty(1024, dtype=torch.uint8, pin_memory=True).data_ptr() == address
    torch.sim.empty_host_cache()
    assert torch.sim.host_memory_stats()["allocated_bytes.current"] == before["allocated_bytes.current"]
