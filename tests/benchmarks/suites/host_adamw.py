"""How near AdamW on the host comes to the rate of the memory.

In turn, on the same shards and with the same threads: a stream of ``torch.add_`` (12 bytes for each parameter: two
values read, one written), a step of AdamW by ``HostOptimizers`` until it is over (28 bytes: four read, three written),
the same with weights and moments as ``master=`` and ``host_state=`` keep them, and steps of torch's AdamW on the
sharded tensors as they are; of a plain model, without a thread, torch's AdamW and that with moments in fewer bytes.
Shards are those of blocks of GPT-2 XL, and many that are small.
"""

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.optimizers.moment_forms import FORMS as MOMENT_FORMS
from lightning_vram.optimizers.moment_forms import HostState
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.techniques.sharding.apply import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.grouping import plan_sharding_groups
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row, compare_seconds, in_turns, time_call

SETTINGS: dict[str, Any] = {"repeats": 7, "blocks": 2, "width": 1600, "small": 4000}
QUICK: dict[str, Any] = {"repeats": 2, "width": 400, "small": 100}
ADD_BYTES = 12
ADAMW_BYTES = 28
NARROW_BYTES = 20  # with moments in bf16
FORMS: tuple[tuple[str, HostState, float], ...] = (  # bytes read and written for each parameter
    ("split", "fp32", 8 + 2 + 16),
    ("fp32", "bf16", NARROW_BYTES),
    ("split", "bf16", 8 + 2 + 8),
    ("split", "8bit", 8 + 2 + 4 * 132 / 128),
)
IN_PLACE: dict[str, tuple[HostState, float]] = {  # ways to step where the parameters are, and bytes
    "AdamW(fused=True)": ("fp32", ADAMW_BYTES),
    "MomentsInBF16": ("bf16", NARROW_BYTES),
    "LowBitOptimizer(bits=8)": ("8bit", 8 + 4 + 4 * 132 / 128),
    "LowBitOptimizer(bits=4)": ("4bit", 8 + 4 + 4 * 68 / 128),
}
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
        self.host = HostOptimizers(self.sharding, num_threads=num_threads)
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.host.attach([self.optimizer])
        self.flat_shards: list[tuple[Tensor, Tensor]] = []  # shards and gradients
        self.parameters: list[DTensor] = []
        for flat_shard in (flat_shard for group in self.sharding.groups for flat_shard in group.flat_shards):
            gradients = torch.randn_like(flat_shard.shards)
            self.flat_shards.append((flat_shard.shards, gradients))
            for parameter, gradient in zip(
                flat_shard.parameters, torch.split(gradients, flat_shard._sizes), strict=True
            ):
                shard = parameter.sharded_param
                shard.grad = like(shard, gradient.view(shard._local_tensor.shape))
                self.parameters.append(shard)
        self.numel = sum(shards.numel() for shards, _ in self.flat_shards)

    def add(self) -> None:
        for shards, gradients in self.flat_shards:
            shards.add_(gradients)

    def step(self) -> None:
        self.optimizer.step()
        self.host.finish()

    def make_torch_step(self, **options: bool) -> Callable[[], None]:
        """On sharded tensors over the same memory."""
        twins = []
        for parameter in self.parameters:
            twin = nn.Parameter(like(parameter, parameter._local_tensor))
            twin.grad = like(parameter, parameter.grad._local_tensor)
            twins.append(twin)
        return torch.optim.AdamW(twins, **options).step


class Kept:
    """A sharded model whose weights and moments are kept on the host in one of the forms."""

    def __init__(self, model: nn.Module, num_threads: int, master: str, form: HostState) -> None:
        mesh, names = dist.init_device_mesh("cpu", (1,)), [name for name, p in model.named_parameters() if p.dim() > 1]
        narrow = {"low_precision_dtype": torch.bfloat16, "low_precision": names} if master == "split" else {}
        sharding = FullSharding(
            model, mesh, plan_sharding_groups(model), ShardingOptions(is_split=master == "split", **narrow)
        )
        self.host = HostOptimizers(sharding, num_threads=num_threads, form=MOMENT_FORMS.get(form))
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.host.attach([self.optimizer])
        for flat_shard in (flat_shard for group in sharding.groups for flat_shard in group.flat_shards):
            flat_shard.is_on_trial = False  # as after the first batch: on trial it would stay joined
            flat_shard.refresh()  # to where it rests
            assert (flat_shard.shards is None) == flat_shard.is_split
            for parameter in flat_shard.parameters:
                parameter.land(torch.randn(parameter.sharded_param._local_tensor.shape, dtype=flat_shard.dtype))

    def step(self) -> None:
        self.optimizer.step()
        self.host.finish()


def make_plain_step(model: nn.Module, form: HostState) -> Callable[[], None]:
    """On plain tensors, with moments in a form."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    found = MOMENT_FORMS.get(form)
    if found is not None:
        LowPrecisionMoments(model, found).attach([optimizer])
    return optimizer.step


def like(shard: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(local, shard.device_mesh, shard.placements, run_check=False)


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each list of shards, number of threads and way to step."""
    num_blocks, num_small = options["blocks"], options["small"]
    models: dict[str, Callable[[], nn.Module]] = {
        f"{num_blocks} blocks of width {options['width']}": partial(make_blocks, num_blocks, options["width"]),
        f"{num_small} x 4096": partial(make_small, num_small),
    }
    with process_group():
        for num_threads in sorted({1, len(os.sched_getaffinity(0))}):
            for name in (name for name in models if options.only in name):
                yield from measure_shards(name, models[name], num_threads, options["repeats"])


def measure_shards(name: str, make_model: Callable[[], nn.Module], num_threads: int, repeats: int) -> Iterator[Row]:
    """Time everything in turn, ``repeats`` times; medians."""
    torch.set_num_threads(num_threads)
    with torch.random.fork_rng():
        case = Shards(make_model(), num_threads)
        kept = {one: Kept(make_model(), num_threads, *one[:2]) for one in FORMS} if len(case.parameters) < MANY else {}
        plain = {name: make_plain_step(make_model(), form) for name, (form, _) in IN_PLACE.items()}
    runs: dict[str, tuple[str, float, Callable[[], None]]] = {
        "add_": ("plain", ADD_BYTES, case.add),
        "HostOptimizers": ("ours", ADAMW_BYTES, case.step),
        **{
            f'master="{master}", host_state="{form}"': ("ours", moved, kept[master, form, moved].step)
            for master, form, moved in kept
        },
        "AdamW(fused=True), DTensor": ("PyTorch", ADAMW_BYTES, case.make_torch_step(fused=True)),
        **{
            name: ("PyTorch" if form == "fp32" else "ours", moved, plain[name])
            for name, (form, moved) in IN_PLACE.items()
        },
    }
    if len(case.parameters) < MANY:
        runs["AdamW(foreach=True), DTensor"] = "PyTorch", ADAMW_BYTES, case.make_torch_step(foreach=True)
    turns = in_turns({variant: partial(time_call, run) for variant, (_, _, run) in runs.items()}, repeats + 1)
    seconds = {variant: found[1:] for variant, found in turns.items()}  # the first makes the states
    case.host.finish()
    case.host.let_go(case.sharding.remove())
    rates = {
        variant: moved * case.numel / statistics.median(seconds[variant]) / 1e9
        for variant, (_, moved, _) in runs.items()
    }
    for variant, rate in rates.items():
        yield {
            "workload": f"{name}, {num_threads} threads",
            "variant": variant,
            "by": runs[variant][0],
            **compare_seconds(seconds[variant], seconds["add_"]),
            "gb_per_second": rate,
            "rate_of_add": rate / rates["add_"],
            "seconds_of_fused": statistics.median(seconds[variant]) / statistics.median(seconds["AdamW(fused=True)"]),
            "all_seconds": seconds[variant],
        }


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
