"""In a Trainer: the precision plugin beside Lightning's, parts that have nothing to do, batches in parts.

And ``fsdp_offload`` beside the run that fits and beside Lightning's ways to offload, one row in each process.
"""

from collections.abc import Sequence
from functools import partial

import torch

from tests.benchmarks.cases import Workload
from tests.benchmarks.compare import measure_ways
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.results import Report
from tests.benchmarks.gpu_day.speed import measure_each, workload_of
from tests.benchmarks.suites import fsdp_offload, micro_batching, mixed_precision, nothing, optimizers
from tests.benchmarks.suites.fsdp_offload import SHAPES, TINY, VARIANTS
from tests.benchmarks.ways import Way

GB = 10**9
PLAIN, PARAMS, OPTIMIZER = "plain", "fsdp_offload, params", "fsdp_offload, optimizer"
LIGHTNING, LIGHTNING_2 = "Lightning FSDP, cpu_offload", "Lightning ModelParallel, CPUOffloadPolicy"
SHORT = {
    PLAIN: "plain",
    PARAMS: "params",
    OPTIMIZER: "optimizer",
    LIGHTNING: "lightning",
    LIGHTNING_2: "lightning_fsdp2",
}
PLUGINS = (
    'precision="bf16-mixed"',
    'LeanMixedPrecision("bf16")',
    'LeanMixedPrecision("bf16", recast_in_backward=True)',
)
IDLE = nothing.WAYS[1].name
_OTHER_OPTIMIZERS = ("foreach", "two-pass", "stochastic", "master", "FSDPOffload")


def run_precision(setting: Setting, report: Report, *, key: str) -> None:
    """Add a row for each plugin."""
    workload = workload_of(key, setting)
    ways = [way for way in next(mixed_precision.make_ways(workload, setting.device)) if way.name in PLUGINS]
    _add_ways(setting, report, workload, ways, 5, 9)


def run_micro_batching(setting: Setting, report: Report, *, key: str) -> None:
    """Add a row for each size."""
    workload = workload_of(key, setting)
    _add_ways(setting, report, workload, micro_batching.make_ways(workload), 3, 9)


def run_idle(setting: Setting, report: Report, *, key: str) -> None:
    """Add a row for each list of callbacks that have nothing to do."""
    _add_ways(setting, report, workload_of(key, setting), nothing.WAYS[:3], 5, 40, is_tracked=False)


def run_optimizers(setting: Setting, report: Report, *, key: str) -> None:
    """Add a row for each way to keep moments and to step."""
    ways = [way for way in optimizers.WAYS if not any(name in way.name for name in _OTHER_OPTIMIZERS)]
    measure_each(setting, report, workload_of(key, setting), ways, steps=5)


def _add_ways(
    setting: Setting,
    report: Report,
    workload: Workload,
    ways: Sequence[Way],
    repeats: int,
    steps: int,
    *,
    is_tracked: bool = True,
) -> None:
    if setting.is_tiny:
        repeats, steps = 1, 2
    rows = measure_ways(workload, ways, setting.device, repeats=repeats, steps=steps, is_tracked=is_tracked)
    report.add(*({"name": row["variant"], **row} for row in rows))


def run_sharded(
    setting: Setting, report: Report, *, shape: str, variant: str, steps: int, is_profiled: bool = False
) -> None:
    """Train one variant at one shape."""
    if setting.is_tiny:
        steps = 1
    chosen = TINY if setting.is_tiny else SHAPES[shape]
    measure = partial(fsdp_offload.measure_row, chosen, variant, steps, is_profiled=is_profiled, device=setting.device)
    report.attempt(variant, lambda: {"shape": shape, "num_tokens": chosen.num_tokens, **measure()})


def _sharded_items(key: str, shape: str, host_bytes: int, *rows: tuple[str, int, int]) -> tuple[Item, ...]:
    """One item for each variant, with its seconds and steps."""
    return tuple(
        Item(
            f"sharded.{key}.{SHORT[variant]}",
            seconds,
            partial(run_sharded, shape=shape, variant=variant, steps=steps),
            row_seconds=3 * seconds,
            host_bytes=0 if variant == PLAIN else host_bytes,
            needs_cuda=VARIANTS[variant].why_not(torch.device("cpu")) is not None,
        )
        for variant, seconds, steps in rows
    )


WITH_GOALS = (
    Item("fits.precision.gpt2_small", 60, partial(run_precision, key="gpt2_small")),
    Item("fits.idle.gpt2_small", 60, partial(run_idle, key="gpt2_small")),
    Item("fits.precision.resnet50", 60, partial(run_precision, key="resnet50_bf16")),
)
OTHERS = (
    Item("fits.micro_batching.gpt2_small", 70, partial(run_micro_batching, key="gpt2_small")),
    Item("fits.precision.gpt2_xl", 100, partial(run_precision, key="gpt2_xl")),
)
OPTIMIZERS = Item("optimizers.gpt2_xl", 115, partial(run_optimizers, key="gpt2_xl"))
XL = _sharded_items("xl_16k", "GPT-2 XL, 16 k tokens", 0, (PLAIN, 25, 6), (OPTIMIZER, 25, 6), (PARAMS, 25, 6))
XL_LIGHTNING_2, XL_LIGHTNING = _sharded_items(
    "xl_16k", "GPT-2 XL, 16 k tokens", 0, (LIGHTNING_2, 32, 4), (LIGHTNING, 90, 4)
)
XL_CLIPPED = _sharded_items("xl_8k_clip", "GPT-2 XL, 8 k tokens, clipping", 36 * GB, (PLAIN, 20, 8), (OPTIMIZER, 45, 8))
THREE = _sharded_items(
    "3b_16k",
    "3 B, 16 k tokens",
    64 * GB,
    (PLAIN, 40, 6),
    (OPTIMIZER, 80, 6),
    (PARAMS, 80, 6),
    (LIGHTNING, 150, 3),
    (LIGHTNING_2, 150, 3),
)
LARGE = (
    *_sharded_items("8b_16k", "8 B, 16 k tokens", 148 * GB, (PARAMS, 200, 3)),
    *_sharded_items("6b_16k", "6 B, 16 k tokens", 112 * GB, (PARAMS, 180, 3)),
)
