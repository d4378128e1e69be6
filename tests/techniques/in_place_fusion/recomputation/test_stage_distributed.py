"""Recomputation where others write to tensors without saying so, and where parameters come and go: c10d and FSDP2."""

import copy
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.BatchNorm1d(16), Block(), Block())
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5, 0.2)
    return model


def train(model: nn.Module, around: AbstractContextManager[object], dtype: torch.dtype | None) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(8, 16)
        with torch.autocast("cpu", dtype, enabled=dtype is not None), around:
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


@pytest.mark.parametrize(("reshard", "dtype"), [(True, None), (False, torch.bfloat16)])
def test_sharded_parameters_are_not_read_when_they_are_gone(mesh: DeviceMesh, reshard: bool, dtype: torch.dtype | None):
    plain = train(make(), nullcontext(), dtype)
    model = make()
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    recomputation = Recomputation(model, min_bytes=0)
    for a, b in zip(plain, train(model, recomputation, dtype), strict=True):
        assert torch.equal(a, b)
    assert recomputation.report.num_dropped > 0


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
