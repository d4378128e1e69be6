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


_ON_HOST: dict[str, dict[str, Any]] = {  # what is kept there in fewer bytes
    'host_state="bf16"': {"host_state": "bf16"},
    'host_state="8bit"': {"host_state": "8bit"},
    'master="split"': {"master": "split"},
    'master="split", host_state="bf16"': {"master": "split", "host_state": "bf16"},
}


def _offload(arguments: dict[str, Any], workload: Workload) -> dict[str, Any]:
    precision = {"precision": "bf16-mixed"} if "master" in arguments else {}
    return {"strategy": FSDPOffloadStrategy(min_params=10_000, **arguments), **precision}


WAYS = (
    PLAIN_TRAINER,
    *(
        Way(f'FSDPOffloadStrategy(offload="{mode}")', "ours", make_trainer_options=partial(_offload, {"offload": mode}))
        for mode in ("params", "optimizer", "none")
    ),
    *(
        Way(f"FSDPOffloadStrategy({name})", "ours", make_trainer_options=partial(_offload, arguments))
        for name, arguments in _ON_HOST.items()
    ),
)


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each workload and way; on a CPU the host is the device, and nothing is saved."""
    for workload in options.workloads():
        ways = options.choose("offload", WAYS)
        yield from measure_ways(workload, ways, options.device, **options.turns)
