"""Step time and peak of all activation techniques: both axes of the picture in one file."""

from collections.abc import Iterator
from typing import Any

from tests.benchmarks.compare import Options, measure_ways
from tests.benchmarks.measure import Row
from tests.benchmarks.ours import OURS

SETTINGS: dict[str, Any] = {"repeats": 5, "steps": 5}
QUICK: dict[str, Any] = {"repeats": 2, "steps": 2}


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each workload and way."""
    for workload, ways in options.pairs("speed", OURS):
        yield from measure_ways(workload, ways, options.device, **options.turns)
