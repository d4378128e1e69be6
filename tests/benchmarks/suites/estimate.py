"""``estimate_memory`` beside the allocator: whole runs of the Trainer, on a GPU, a process for each."""

from collections.abc import Iterator
from typing import Any

from tests.benchmarks.compare import Options
from tests.benchmarks.estimates.cases import CASES
from tests.benchmarks.estimates.measure import measure_all
from tests.benchmarks.measure import Row

SETTINGS: dict[str, Any] = {"without_cudnn": False}
QUICK: dict[str, Any] = {}


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each case; convolutions do without their workspaces where cuDNN is left out."""
    names = [name for name in CASES if options.only in name]
    if options.device.type == "cpu":
        yield {"workload": f"{len(names)} cases", "variant": "estimate_memory", "by": "ours", "error": "needs a GPU"}
        return
    for row in measure_all(names, has_cudnn=not options["without_cudnn"]):
        yield {"workload": row["name"], "variant": "estimate_memory", "by": "ours", **row}
