"""Ranks that are not there."""

import pytest
import torch
import torch.distributed as dist

from lightning_vram.memory.estimate.fake_device import FAKE_GPU, fake_device, fake_ranks


@pytest.fixture
def ranks():
    with (
        fake_device(num_bytes=1, allocated_bytes=lambda: 0, on_pin=lambda tensor: None),
        fake_ranks(4),
    ):
        yield


def test_collectives_run_on_the_host_and_on_the_card(ranks):
    assert (dist.get_rank(), dist.get_world_size()) == (0, 4)
    for device in ("cpu", FAKE_GPU):
        part = torch.empty(8, device=device)
        parts = [torch.empty(8, device=device) for _ in range(4)]
        dist.all_gather(parts, part)
        dist.reduce_scatter(part, parts)
        dist.all_reduce(part)
    dist.barrier()


def test_nothing_is_left_of_them():
    before = dict(vars(dist)), dict(dist.Backend.default_device_backend_map)
    with fake_ranks(2):
        assert dist.is_initialized()
    assert not dist.is_initialized()
    assert (dict(vars(dist)), dict(dist.Backend.default_device_backend_map)) == before
