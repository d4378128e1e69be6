"""Averages of weights that rest on the host, moved beside the training and read as soon as they were told to move."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mutations.sharding import batches, late_threads, local, sgd, trained
from support.sharded_nets import WIDTH, Net, loss_of, make
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_vram.optimizers.averages import HostAverage
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.techniques.sharded_checkpoints.states import gather_module_state


class _Counting(Net):
    """With a scalar, which stays whole, and a buffer that each forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(x.detach().mean(0))
        return super().forward(x) * self.scale


@contextmanager
def _averaged() -> Iterator[tuple[Any, HostOptimizers, AveragedModel]]:
    average = AveragedModel(make(_Counting), avg_fn=get_ema_avg_fn(0.5), use_buffers=True)
    with late_threads(), trained(net=_Counting) as (network, host):
        shards = HostAverage(average, network, host._sharding, gather_module_state)
        shards.optimizers = host
        yield network, host, average
        host.finish()
        shards.remove(make_whole=False)


def _step(network: Any, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(network, batch).backward()
    optimizer.step()


def read_at_once() -> list[Tensor]:
    """Each tensor of the average by itself."""
    results: list[Tensor] = []
    with _averaged() as (network, host, average):
        optimizer, parameters = sgd(network, host), list(average.module.parameters())
        for batch in batches():
            _step(network, optimizer, batch)
            average.update_parameters(network)
            results += [local(one.detach().clone()) for one in parameters if one.dim()]
            results += [one.detach().clone() for one in (*average.module.parameters(), *average.module.buffers())]
    return [local(result) for result in results]


@torch.no_grad()
def written_at_once() -> list[Tensor]:
    """A user writes to weights and buffers after the average was told to move towards them."""
    results: list[Tensor] = []
    with _averaged() as (network, host, average):
        optimizer = sgd(network, host)
        for batch in batches():
            with torch.enable_grad():
                _step(network, optimizer, batch)
            average.update_parameters(network)
            for tensor in (*network.parameters(), *network.buffers()):
                tensor.mul_(0.5)
            results += average.state_dict().values()
    return results
