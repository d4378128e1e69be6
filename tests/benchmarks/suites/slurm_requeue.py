"""How many preemptions a training survives.

On a SLURM cluster of two nodes that it starts itself: one job is signalled at a random moment of each of its starts,
and its final weights are compared with those of a job without a break.
"""

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row

SETTINGS: dict[str, Any] = {"times": 20, "strategies": "ddp,sharded"}
QUICK: dict[str, Any] = {"times": 1, "strategies": "ddp"}
STEPS_PER_START = 150


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each strategy: ``ddp``, ``sharded`` or ``fsdp_offload``."""
    sys.path.insert(0, str(Path(__file__).parents[2]))  # as pytest has it
    from slurm.cluster import Cluster

    with tempfile.TemporaryDirectory() as folder, Cluster() as cluster:
        for strategy in options["strategies"].split(","):
            yield preempt(cluster, Path(folder), strategy, options["times"])


def preempt(cluster: Any, folder: Path, strategy: str, times: int) -> Row:
    """Preempt one job ``times`` times."""
    from slurm.training import Training

    options = ("--strategy", strategy, "--max_steps", STEPS_PER_START * (times + 1))
    whole = Training(cluster, folder / f"{strategy}_whole", *options)
    assert whole.end(600) == "COMPLETED", whole.output
    training = Training(cluster, folder / strategy, *options)
    start = time.perf_counter()
    for number in range(1, times + 1):
        training.wait_for_start(number)
        time.sleep(random.random() * STEPS_PER_START * 0.008)
        cluster.signal(training.job, "USR1")
    state = training.end(600)
    stops = [[event["step"] for event in training.events("stop", rank)] for rank in (0, 1)]
    is_equal = state == "COMPLETED" and all(
        torch.equal(weight, training.weights[name]) for name, weight in whole.weights.items()
    )
    return {
        "workload": "two nodes",
        "variant": f"SlurmRequeue(), {strategy}",
        "by": "ours",
        "signals": str(times),
        "restarts": str(cluster.restarts(training.job)),
        "state": state,
        "ranks stopped at the same steps": str(stops[0] == stops[1]),
        "weights equal to the bit": str(is_equal),
        "seconds": time.perf_counter() - start,
        "all_stops": stops[0],
    }
