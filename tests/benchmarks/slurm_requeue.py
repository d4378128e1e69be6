"""How many preemptions a training survives: PYTHONPATH=.:tests python -m tests.benchmarks.slurm_requeue.

On a SLURM cluster of two nodes that it starts itself: one job is signalled at a random moment of each of its starts,
and its final weights are compared with those of a job without a break.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

import torch
from slurm.cluster import Cluster
from slurm.training import Training

from tests.benchmarks.measure import Row
from tests.benchmarks.report import report

STEPS_PER_START = 150


def measure(cluster: Cluster, folder: Path, strategy: str, times: int) -> Row:
    """Preempt one job ``times`` times."""
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
        "strategy": strategy,
        "signals": str(times),
        "restarts": str(cluster.restarts(training.job)),
        "state": state,
        "ranks stopped at the same steps": str(stops[0] == stops[1]),
        "weights equal to the bit": str(is_equal),
        "seconds": time.perf_counter() - start,
        "all_stops": stops[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.slurm_requeue", description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--strategy", action="append", choices=("ddp", "fsdp_offload", "sharded"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Cluster() as cluster:
        strategies = arguments.strategy or ("ddp", "sharded")
        rows = [measure(cluster, Path(folder), strategy, arguments.times) for strategy in strategies]
    report("slurm_requeue", rows, arguments.output)


if __name__ == "__main__":
    main()
