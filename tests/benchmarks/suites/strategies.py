"""``fsdp_offload`` in a Trainer beside the run that fits, and beside others' ways to offload."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning_vram import FSDPOffloadStrategy
from tests.benchmarks.cases import Workload
from tests.benchmarks.compare import Options, measure_ways
from tests.benchmarks.measure import Row
from tests.benchmarks.ways import PLAIN_TRAINER, Way

SETTINGS: dict[str, Any] = {"repeats": 3, "steps": 5}
QUICK: dict[str, Any] = {"repeats": 1, "steps": 2}


def _offload(arguments: dict[str, Any], workload: Workload) -> dict[str, Any]:
    return {"strategy": FSDPOffloadStrategy(min_params=10_000, **arguments)}


def _in_16_bit(arguments: dict[str, Any], workload: Workload) -> dict[str, Any]:
    return {**_offload(arguments, workload), "precision": "bf16-mixed"}


MODES = tuple(
    Way(f'FSDPOffloadStrategy(offload="{mode}")', "ours", make_trainer_options=partial(_offload, {"offload": mode}))
    for mode in ("params", "optimizer", "none")
)
LESS_ON_HOST = (
    *(
        Way(
            f'FSDPOffloadStrategy(host_state="{form}")',
            "ours",
            make_trainer_options=partial(_offload, {"host_state": form}),
        )
        for form in ("bf16", "8bit")
    ),
    *(
        Way(
            f'FSDPOffloadStrategy(master="{master}"), precision="bf16-mixed"',
            "ours",
            make_trainer_options=partial(_in_16_bit, {"master": master}),
        )
        for master in ("fp32", "split")
    ),
)
WAYS = (PLAIN_TRAINER, *MODES, *LESS_ON_HOST)


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each workload and way; on a CPU the host is the device, and nothing is saved."""
    for workload in options.workloads():
        ways = options.choose("offload", WAYS)
        yield from measure_ways(workload, ways, options.device, **options.turns)
