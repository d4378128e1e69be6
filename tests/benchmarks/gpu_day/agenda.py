"""All items in the order of their worth, in groups: the first two fill one call each."""

import re

from tests.benchmarks.gpu_day import (
    device_tests,
    fits,
    losses,
    plans,
    probe,
    profiles,
    running_out,
    smoke,
    speed,
    steps,
    traces,
)
from tests.benchmarks.gpu_day.items import Item, Job

GROUPS: dict[str, tuple[Item, ...]] = {
    "first": (
        *probe.ITEMS,
        *(plans.AUTO_PLAN, device_tests.QUICK, *smoke.ITEMS, running_out.PAGE, *traces.PEAKS),  # they share
        speed.XL,
        *fits.XL,
    ),
    "second": (
        fits.XL_LIGHTNING_2,
        profiles.XL,
        probe.HOST_ADAMW,
        losses.FIRST,
        fits.OPTIMIZERS,
        speed.WIDE,
        speed.IMAGES,
        speed.SMALL,
    ),
    "rest": (
        steps.XL,
        *speed.WITH_GOALS[:5],
        *fits.XL_CLIPPED,
        *fits.WITH_GOALS,
        *speed.WITH_GOALS[5:],
        *losses.ITEMS,
        *plans.ITEMS,
        running_out.LENGTHS,
        fits.XL_LIGHTNING,
        *traces.ITEMS,
        *speed.OTHERS[:3],
        *fits.THREE,
        *fits.LARGE,
        *fits.OTHERS,
        *speed.OTHERS[3:],
        *device_tests.ITEMS,
        *profiles.ITEMS,
    ),
}
ITEMS = tuple(item for items in GROUPS.values() for item in items)
_SAME_WAY = (  # as others, with other figures: toys leave them out
    r"tests\.(?!memory_core)|quick_tests|plan\.(?!gpt2_small)|sharded\.(?!xl_16k)|speed\.(gpt2_xl|resnet50_fp32)|fits\.precision\.gpt2_xl"
    r"|profile\.(?!gpt2_small\.matmuls|xl_16k)"
)


def choose(groups: str, pattern: str, job: Job) -> list[Item]:
    """Return items in their order; of toys that walk the same way twice, one.

    Args:
        groups: Names of groups with commas between; empty for all.
        pattern: Regular expression, found in names of items.
        job: How they are run.
    """
    chosen = [
        item
        for name in (groups.split(",") if groups else GROUPS)
        for item in GROUPS[name]
        if re.search(pattern, item.name)
    ]
    if job.device != "cuda":
        chosen = [item for item in chosen if not item.needs_cuda]
    if job.is_tiny:
        chosen = [item for item in chosen if not re.match(_SAME_WAY, item.name)]
    return chosen
