"""All items in the order of their worth."""

import re

from tests.benchmarks.gpu_day import (
    device_tests,
    fits,
    goals,
    losses,
    plans,
    profiles,
    running_out,
    smoke,
    speed,
    traces,
)
from tests.benchmarks.gpu_day.items import Item, Job

ITEMS = (
    *smoke.ITEMS,
    *device_tests.ITEMS,
    *speed.WITH_GOALS[:5],
    *fits.XL,
    *fits.XL_CLIPPED,
    *fits.WITH_GOALS,
    *speed.WITH_GOALS[5:],
    *losses.ITEMS,
    *plans.ITEMS,
    *running_out.ITEMS,
    *fits.XL_LIGHTNING,
    *traces.ITEMS,
    *profiles.ITEMS,
    *speed.OTHERS[:3],
    *fits.THREE,
    *fits.LARGE,
    *fits.OTHERS,
    *speed.OTHERS[3:],
)
_SAME_WAY = (  # as others, with other figures: toys leave them out
    r"tests\.(?!memory_core)|plan\.(?!gpt2_small)|sharded\.(?!xl_16k)|speed\.(gpt2_xl|resnet50_fp32)|fits\.precision\.gpt2_xl"
    r"|profile\.(?!gpt2_small\.matmuls|xl_16k)"
)


def choose(pattern: str, job: Job) -> list[Item]:
    """Return the items whose names hold ``pattern``; of toys that walk the same way twice, one."""
    chosen = [item for item in ITEMS if re.search(pattern, item.name)]
    if job.device != "cuda":
        chosen = [item for item in chosen if not item.needs_cuda]
    if job.is_tiny:
        chosen = [item for item in chosen if not re.match(_SAME_WAY, item.name)]
    return chosen


def is_wanted(item: Item, job: Job) -> bool:
    """Whether an item runs now: a profile only of what has missed a goal, or of toys."""
    return item.after is None or job.is_tiny or goals.is_missed(item.after, job.folder)
