"""Run a suite, print a table, write the figures with device and versions."""

import argparse
from pathlib import Path

import torch

from tests.benchmarks import plans
from tests.benchmarks.cases import WORKLOADS
from tests.benchmarks.estimates.cases import CASES
from tests.benchmarks.estimates.measure import measure_all
from tests.benchmarks.measure import Row, measure_memory, measure_speed
from tests.benchmarks.report import report
from tests.benchmarks.variants import COMPILED_VARIANTS, GPU_PEERS, VARIANTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--suite", choices=["memory", "speed", "estimate", "plan"], required=True)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; kept under tests/benchmarks/results/")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats of each variant (speed, plan)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per repeat (speed, plan)")
    parser.add_argument("--only", default="", help="part of a workload's name")
    parser.add_argument("--variants", default="", help="part of a variant's name; plain is always there (speed)")
    parser.add_argument("--without-cudnn", action="store_true", help="convolutions without their workspaces (estimate)")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    if arguments.suite == "estimate":
        names = [name for name in CASES if arguments.only in name]
        rows = list(measure_all(names, has_cudnn=not arguments.without_cudnn))
        report(arguments.suite, rows, arguments.output)
        return
    for workload in WORKLOADS:
        if (workload.needs_gpu and device.type == "cpu") or arguments.only not in workload.name:
            continue
        if arguments.suite == "plan":
            rows += plans.measure(workload, device, arguments.repeats, arguments.steps)
        elif arguments.suite == "memory":
            rows += [measure_memory(workload, variant, device) for variant in VARIANTS]
        else:
            variants = choose_variants(device, arguments.variants)
            rows += measure_speed(workload, device, variants, arguments.repeats, arguments.steps)
    report(arguments.suite, rows, arguments.output)


def choose_variants(device: torch.device, part: str) -> list[str]:
    """Plain and those with ``part`` in their name; on a GPU others' ways as well."""
    peers = {**GPU_PEERS, **COMPILED_VARIANTS} if device.type == "cuda" else {}
    return ["plain", *(name for name in [*VARIANTS, *peers] if name != "plain" and part in name)]


if __name__ == "__main__":
    main()
