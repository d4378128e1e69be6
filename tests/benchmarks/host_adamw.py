"""How near AdamW on the host comes to the rate of the memory: python -m tests.benchmarks.host_adamw.

In turn, on the same shards and with the same threads: a stream of ``torch.add_`` (12 bytes for each parameter: two
values read, one written), a step of ``OffloadedAdamW`` until it is over (28 bytes: four read, three written), and steps
of torch's AdamW on the sharded tensors as they are. Shards are those of blocks of GPT-2 XL, and many that are small.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_vram.optimizers.on_host.offloaded_adamw import OffloadedAdamW
from lightning_vram.techniques.sharding.apply import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.grouping.plan import plan_sharding_groups
from tests.benchmarks.measure import Row
from tests.benchmarks.report import report

ADD_BYTES = 12
ADAMW_BYTES = 28
MANY = 100  # tensors: DTensor looks at a list anew in every step, for minutes if it is one of thousands


def make_blocks(num_blocks: int, width: int = 1600) -> nn.Module:
    """The parameters of transformer blocks."""

    def make_block() -> nn.Module:
        sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        return nn.Sequential(nn.LayerNorm(width), nn.LayerNorm(width), *(nn.Linear(*size) for size in sizes))

    return nn.Sequential(*(make_block() for _ in range(num_blocks)))


def make_small(num_tensors: int, numel: int = 4096) -> nn.Module:
    return nn.Sequential(*(nn.LayerNorm(numel, bias=False) for _ in range(num_tensors)))


class Shards:
    """A model that is sharded over one rank, with gradients side by side."""

    def __init__(self, model: nn.Module, num_threads: int) -> None:
        mesh = dist.init_device_mesh("cpu", (1,))
        self.sharding = FullSharding(model, mesh, plan_sharding_groups(model), ShardingOptions())
        self.optimizer = OffloadedAdamW(self.sharding, num_threads=num_threads)
        self.lanes: list[tuple[Tensor, Tensor]] = []  # shards and gradients
        self.parameters: list[DTensor] = []
        for lane in (lane for group in self.sharding.groups for lane in group.lanes):
            gradients = torch.randn_like(lane.shards)
            self.lanes.append((lane.shards, gradients))
            for parameter, gradient in zip(lane.parameters, torch.split(gradients, lane._sizes), strict=True):
                shard = parameter.sharded_param
                shard.grad = like(shard, gradient.view(shard._local_tensor.shape))
                self.parameters.append(shard)
        self.numel = sum(shards.numel() for shards, _ in self.lanes)

    def add(self) -> None:
        for shards, gradients in self.lanes:
            shards.add_(gradients)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.finish()

    def make_torch_step(self, **options: bool) -> Callable[[], None]:
        """On sharded tensors over the same memory."""
        twins = []
        for parameter in self.parameters:
            twin = nn.Parameter(like(parameter, parameter._local_tensor))
            twin.grad = like(parameter, parameter.grad._local_tensor)
            twins.append(twin)
        return torch.optim.AdamW(twins, **options).step


def like(shard: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(local, shard.device_mesh, shard.placements, run_check=False)


def measure(name: str, make_model: Callable[[], nn.Module], num_threads: int, repeats: int) -> Iterator[Row]:
    """Time everything in turn, ``repeats`` times; medians."""
    torch.set_num_threads(num_threads)
    with torch.random.fork_rng():
        case = Shards(make_model(), num_threads)
    runs: dict[str, tuple[int, Callable[[], None]]] = {
        "add_": (ADD_BYTES, case.add),
        "OffloadedAdamW": (ADAMW_BYTES, case.step),
        "AdamW(fused=True), DTensor": (ADAMW_BYTES, case.make_torch_step(fused=True)),
    }
    if len(case.parameters) < MANY:
        runs["AdamW(foreach=True), DTensor"] = ADAMW_BYTES, case.make_torch_step(foreach=True)
    seconds: dict[str, list[float]] = {variant: [] for variant in runs}
    for repeat in range(repeats + 1):
        for variant, (_, run) in runs.items():
            start = time.perf_counter()
            run()
            if repeat:  # the first makes the states
                seconds[variant].append(time.perf_counter() - start)
    case.optimizer.close()
    rates = {
        variant: moved * case.numel / statistics.median(seconds[variant]) / 1e9 for variant, (moved, _) in runs.items()
    }
    for variant, rate in rates.items():
        yield {
            "shards": name,
            "threads": str(num_threads),
            "variant": variant,
            "seconds": statistics.median(seconds[variant]),
            "gb_per_second": rate,
            "rate_of_add": rate / rates["add_"],
            "all_seconds": seconds[variant],
        }


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.host_adamw", description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--blocks", type=int, default=2, help="of GPT-2 XL: 31 M parameters each")
    parser.add_argument("--small", type=int, default=4000, help="tensors of 4096 elements")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    rows = []
    with process_group():
        for num_threads in sorted({1, len(os.sched_getaffinity(0))}):
            for name, make in (
                (f"{arguments.blocks} blocks of GPT-2 XL", lambda: make_blocks(arguments.blocks)),
                (f"{arguments.small} x 4096", lambda: make_small(arguments.small)),
            ):
                rows += measure(name, make, num_threads, arguments.repeats)
    report("host_adamw", rows, arguments.output)


if __name__ == "__main__":
    main()
