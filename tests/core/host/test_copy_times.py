"""Spans are noted where somebody asks for them, and read when they are over."""

import pytest
import torch
from support.devices import DEVICE, device_module

from lightning_vram.core.host.transfers import (
    TO_DEVICE,
    TO_HOST,
    WAIT_FOR_FETCHING,
    Copies,
    CopyTimes,
    HostClock,
    make_copies,
    timed,
)


class Ticking:
    """Each mark is a second after the one before."""

    def __init__(self) -> None:
        self.seconds_passed = 0

    def mark(self, stream=None) -> int:
        self.seconds_passed += 1
        return self.seconds_passed

    def seconds(self, start: int, end: int) -> float:
        return end - start


def test_copies_that_block_are_timed_each_way() -> None:
    copies, source, piece = Copies(), torch.arange(8, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8)
    copies.send(source, [piece], 0)  # before anybody asked
    copies.times = times = CopyTimes(Ticking())
    for _ in range(3):
        copies.send(source, [piece], 0)
    copies.fetch([piece], torch.empty(8, dtype=torch.uint8), None)
    copies.times = None
    copies.send(source, [piece], 0)
    assert (times.num_bytes(TO_HOST), times.seconds(TO_HOST)) == (24, 3)
    assert (times.num_bytes(TO_DEVICE), times.seconds(TO_DEVICE)) == (8, 1)
    assert (times.num_bytes(WAIT_FOR_FETCHING), times.seconds(WAIT_FOR_FETCHING)) == (0, 0)


def test_the_host_has_a_clock() -> None:
    assert isinstance(Copies().make_clock(), HostClock)
    times = CopyTimes(HostClock())
    with timed(times, "nothing"):
        pass
    assert 0 <= times.seconds("nothing") < 1
    with timed(None, "nothing"):
        pass


@pytest.mark.device
def test_copies_on_a_stream_are_timed_there() -> None:
    source = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    piece = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    copies = make_copies(source)
    clock = copies.make_clock()
    copies.times = times = CopyTimes(clock)
    start = clock.mark()
    copies.send(source, [piece], 0)
    target = torch.empty_like(source)
    copies.fetch([piece], target, copies.mark()).wait(target)
    end = clock.mark()
    device_module().synchronize()
    assert times.num_bytes(TO_HOST) == times.num_bytes(TO_DEVICE) == 1 << 20
    assert times.seconds(TO_HOST) > 0
    assert times.seconds(TO_DEVICE) > 0
    assert 0 <= times.seconds(WAIT_FOR_FETCHING) <= clock.seconds(start, end)
    copies.close()
