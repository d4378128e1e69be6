"""Recomputation where others write to tensors without saying so: c10d."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("where", ["saved", "made", "view"])
def test_a_collective_that_overwrites_without_a_new_version_is_seen(mesh: DeviceMesh, where: str):
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            y = self.norm(h)
            with torch.no_grad():
                target = {"saved": h.detach(), "made": y.detach(), "view": y.view(-1)}[where]
                before = target._version
                target.data.mul_(2)  # what a collective of several ranks would have done
                dist.all_reduce(target)
                assert target._version == before
            return self.last(F.silu(F.silu(y) * 2))

    plain = Scale()
    ours = copy.deepcopy(plain)
    x = torch.randn(2, 3, 8, 8)
    plain(x).square().mean().backward()
    with Recomputation(ours, min_bytes=0, verify="never"):
        loss = ours(x).square().mean()
    loss.backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
