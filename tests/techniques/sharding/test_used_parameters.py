"""Parameters that only some ranks use: who has a gradient in the end, and which."""

import pytest
import torch
import torch.distributed as dist
from support.sharded_nets import Net, assert_same, batch, gradients, loss_of, make, on_ranks, sharded
from torch import Tensor, nn

from lightning_vram.techniques.sharding.apply import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.grouping import ShardingPlan

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


class Scaled(Net):
    """Scales that are used by choice."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(float(i + 1))) for i in range(3)])
        self.used = (0,)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.used:
            x = x * self.scales[index]
        return super().forward(x)


def test_one_rank_needs_no_collective(mesh, monkeypatch):
    net = make(Scaled)
    with sharded(net) as sharding:
        monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: pytest.fail("there is nobody else"))
        loss_of(net, batch(0)).backward()
        assert net.scales[1].grad is None
        assert all(group.present == set() for group in sharding.groups)
        monkeypatch.undo()


class Choice(nn.Module):
    """Calls one of two layers that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.chosen](x)


def call_different_layers() -> None:
    net = make(Choice)
    plan = ShardingPlan((("layers.0",), ("layers.1",)), ())
    sharding = FullSharding(net, dist.init_device_mesh("cpu", (2,)), plan, ShardingOptions())
    net.chosen = dist.get_rank()
    with pytest.raises(RuntimeError, match="called other sharded layers"):
        net(torch.ones(2, 8)).sum().backward()
    sharding.remove(make_whole=False)


def test_ranks_that_call_different_layers_are_told(tmp_path):
    on_ranks(tmp_path, call_different_layers)


class Partly(Net):
    """Leaves the norm out, which is gathered with the root."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_factor_of_the_users_divides_gradients_on_one_rank_and_makes_none(mesh):
    net, plain = make(Partly), make(Partly)
    with sharded(net) as sharding:
        for group in sharding.groups:
            group.gradient_divide_factor = 2.0
        loss_of(net, batch(0)).backward()
        loss_of(plain, batch(0)).backward()
        assert_same(gradients(net), {name: gradient / 2 for name, gradient in gradients(plain).items()})
        assert not any(group.doubtful for group in sharding.groups)
