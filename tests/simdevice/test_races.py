"""Programs that are wrong on a device, and the same programs with the wait that they lack: the former are seen."""

import functools

import pytest
import torch
from torch import distributed

pytestmark = pytest.mark.sim
NUM = 256  # 1 KiB


@pytest.fixture(autouse=True)
def no_races_before_or_after():
    """A program that was wrong leaves its copies to the next."""
    torch.sim.synchronize()
    torch.sim.clear_races()
    yield
    with torch.sim.settings(races=0):
        torch.sim.synchronize()
    assert not torch.sim.pending()


def pinned(value=1.0):
    return torch.full((NUM,), value).pin_memory()


def on_side_stream(copy, *, behind_current=True):
    """Run ``copy`` on a stream of its own; return what it made, the stream and the event behind it."""
    side = torch.sim.Stream()
    if behind_current:
        side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        return copy(), side, side.record_event()


def copy_to_the_device(is_right):
    source = pinned()
    target, _, arrived = on_side_stream(lambda: source.to("sim", non_blocking=True))
    if is_right:
        torch.sim.current_stream().wait_event(arrived)
    return target + 1


def copy_of_what_is_not_computed_yet(is_right):
    computed = torch.zeros(NUM, device="sim") + 2
    target, side, _ = on_side_stream(lambda: computed.to("cpu", non_blocking=True), behind_current=is_right)
    computed.record_stream(side)
    side.synchronize()
    return target.clone()


def memory_used_again_too_early(is_right):
    source, target = torch.full((NUM,), 2.0, device="sim"), torch.empty(NUM, pin_memory=True)
    _, side, _ = on_side_stream(functools.partial(target.copy_, source, non_blocking=True))
    if is_right:
        source.record_stream(side)
    del source
    torch.full((NUM,), 5.0, device="sim")
    side.synchronize()
    return target.clone()


def a_source_that_is_overwritten_during_its_copy(is_right):
    source, target = torch.full((NUM,), 2.0, device="sim"), torch.empty(NUM, pin_memory=True)
    _, side, copied = on_side_stream(lambda: target.copy_(source, non_blocking=True))
    if is_right:
        torch.sim.current_stream().wait_event(copied)
    source.zero_()
    side.synchronize()
    return target.clone()


def kernels_on_two_streams(is_right):
    tensor = torch.zeros(NUM, device="sim")
    _, _, done = on_side_stream(lambda: tensor.add_(1))
    if is_right:
        done.wait()
    return tensor.mul_(2)


def pinned_memory_that_the_host_overwrites(is_right):
    source = pinned(2.0)
    target = source.to("sim", non_blocking=True)
    kernel = target + 1  # the copy is carried out here, and a device that lags may be reading still
    if is_right:
        torch.sim.synchronize()
    source.fill_(7)
    torch.sim.synchronize()
    return kernel


def collective(is_right):
    tensor = torch.full((NUM,), 3.0, device="sim")
    work = distributed.all_reduce(tensor, async_op=True)
    if is_right:
        work.wait()
    return tensor + 1


KIB = "1.00 KiB"
PROGRAMS = {
    copy_to_the_device: (2, f"add on stream 0 reads {KIB} that a copy to the device on stream S wrote"),
    copy_of_what_is_not_computed_yet: (2, f"a copy to the host on stream S reads {KIB} that add on stream 0 wrote"),
    memory_used_again_too_early: (2, f"fill_ on stream 0 writes {KIB} that a copy to the host on stream S read"),
    a_source_that_is_overwritten_during_its_copy: (
        2,
        f"zero_ on stream 0 writes {KIB} that a copy to the host on stream S read",
    ),
    kernels_on_two_streams: (2, f"mul_ on stream 0 writes {KIB} that add_ on stream S wrote"),
}


def words(message):
    """The message without the number of the side stream and without ``aten::``."""
    text = message.replace("aten::", "").removeprefix("simulated device: ").removesuffix(", and does not wait for it")
    return " ".join("S" if before == "stream" and word != "0" else word for before, word in pairs(text.split()))


def pairs(items):
    return zip([None, *items], items, strict=False)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_race_is_an_error_that_names_both_sides(program):
    expected = PROGRAMS[program][1]
    with pytest.raises(RuntimeError, match="and does not wait for it") as caught:
        program(is_right=False)
    assert words(str(caught.value).splitlines()[0]) == expected
    assert [words(text) for text in torch.sim.races()] == [expected]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_same_program_with_its_wait_is_right(program):
    result = program(is_right=True)
    assert torch.equal(result.cpu(), torch.full((NUM,), float(PROGRAMS[program][0])))
    assert torch.sim.races() == []


def test_the_host_that_overwrites_what_a_copy_reads_is_told_when_it_waits():
    expected = "the host has written to 1.00 KiB of pinned memory that a copy to the device on stream 0 reads"
    with pytest.raises(RuntimeError, match=expected):
        pinned_memory_that_the_host_overwrites(is_right=False)
    assert pinned_memory_that_the_host_overwrites(is_right=True).tolist() == [3.0] * NUM


def test_a_collective_that_is_not_waited_for_is_seen():
    distributed.init_process_group("simccl", store=distributed.HashStore(), rank=0, world_size=1)
    with pytest.raises(RuntimeError, match=r"add on stream 0 reads 1.00 KiB that allreduce on stream .* wrote"):
        collective(is_right=False)
    assert collective(is_right=True).tolist() == [4.0] * NUM


def test_what_is_read_too_early_is_poison():
    with torch.sim.settings(races=0):
        assert copy_to_the_device(is_right=False).isnan().all()
        target = torch.ones(NUM, device="sim").to("cpu", non_blocking=True)
        assert target.isnan().all()
        torch.sim.synchronize()
        assert target.tolist() == [1.0] * NUM
        assert torch.empty(NUM, device="sim").isnan().all()


def test_operators_for_which_the_host_waits_can_be_refused():
    tensor = torch.ones(NUM, device="sim")
    torch.sim.set_sync_debug_mode("error")
    try:
        tensor.add_(1)
        for wait in (lambda: tensor.sum().item(), tensor.nonzero, tensor.cpu, lambda: torch.ones(2).to("sim")):
            with pytest.raises(RuntimeError, match="called a synchronizing SIM operation"):
                wait()
    finally:
        torch.sim.set_sync_debug_mode("default")
