"""``fsdp_offload`` beside the run that fits and beside Lightning's offload: one row each, in a process of its own."""

from functools import partial

from tests.benchmarks import fsdp_offload
from tests.benchmarks.fsdp_offload import SHAPES, TINY, VARIANTS
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.report import Report
from tests.benchmarks.measure import Row

GB = 10**9
PLAIN, PARAMS, OPTIMIZER, LIGHTNING = (
    "plain",
    "fsdp_offload, params",
    "fsdp_offload, optimizer",
    "Lightning FSDP, cpu_offload",
)
SHORT = {PLAIN: "plain", PARAMS: "params", OPTIMIZER: "optimizer", LIGHTNING: "lightning"}


def run(setting: Setting, report: Report, *, shape: str, variant: str, steps: int, is_profiled: bool = False) -> None:
    """Train one variant at one shape."""
    if setting.is_tiny:
        steps = 1
    chosen = TINY if setting.is_tiny else SHAPES[shape]
    measure = partial(fsdp_offload.measure_row, chosen, variant, steps, is_profiled=is_profiled, device=setting.device)
    report.attempt(variant, lambda: {"shape": shape, "num_tokens": chosen.num_tokens, **_with_error(measure())})


def _with_error(row: Row) -> Row:
    return row if row["fits"] == "yes" else {**row, "error": row["fits"]}


def _items(key: str, shape: str, host_bytes: int, *rows: tuple[str, int, int]) -> tuple[Item, ...]:
    """One item for each variant, with its seconds and steps."""
    return tuple(
        Item(
            f"sharded.{key}.{SHORT[variant]}",
            seconds,
            partial(run, shape=shape, variant=variant, steps=steps),
            row_seconds=3 * seconds,
            host_bytes=0 if variant == PLAIN else host_bytes,
            needs_cuda=VARIANTS[variant].needs_gpu,
        )
        for variant, seconds, steps in rows
    )


XL = _items("xl_16k", "GPT-2 XL, 16 k tokens", 36 * GB, (PLAIN, 25, 8), (OPTIMIZER, 45, 8), (PARAMS, 45, 8))
XL_LIGHTNING = _items("xl_16k", "GPT-2 XL, 16 k tokens", 36 * GB, (LIGHTNING, 90, 4))
XL_CLIPPED = _items("xl_8k_clip", "GPT-2 XL, 8 k tokens, clipping", 36 * GB, (PLAIN, 20, 8), (OPTIMIZER, 45, 8))
THREE = _items(
    "3b_16k", "3 B, 16 k tokens", 64 * GB, (PLAIN, 40, 6), (OPTIMIZER, 80, 6), (PARAMS, 80, 6), (LIGHTNING, 150, 3)
)
LARGE = (
    *_items("8b_16k", "8 B, 16 k tokens", 148 * GB, (PARAMS, 200, 3)),
    *_items("6b_16k", "6 B, 16 k tokens", 112 * GB, (PARAMS, 180, 3)),
)
