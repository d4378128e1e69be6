"""Run a suite, print a table, write the figures with device and versions."""

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lightning_vram.memory.units import format_bytes
from tests.benchmarks.cases import WORKLOADS
from tests.benchmarks.estimates.cases import CASES
from tests.benchmarks.estimates.measure import measure_all
from tests.benchmarks.measure import Row, describe_machine, measure_memory, measure_speed
from tests.benchmarks.variants import COMPILED_VARIANTS, GPU_PEERS, VARIANTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--suite", choices=["memory", "speed", "estimate"], required=True)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; kept under tests/benchmarks/results/")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats of each variant (speed)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per repeat (speed)")
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
        if arguments.suite == "memory":
            rows += [measure_memory(workload, variant, device) for variant in VARIANTS]
        else:
            variants = choose_variants(device, arguments.variants)
            rows += measure_speed(workload, device, variants, arguments.repeats, arguments.steps)
    report(arguments.suite, rows, arguments.output)


def choose_variants(device: torch.device, part: str) -> list[str]:
    """Plain and those with ``part`` in their name; on a GPU others' ways as well."""
    peers = {**GPU_PEERS, **COMPILED_VARIANTS} if device.type == "cuda" else {}
    return ["plain", *(name for name in [*VARIANTS, *peers] if name != "plain" and part in name)]


def report(suite: str, rows: list[Row], output: Path | None) -> None:
    """Print the table, and write the figures with device and versions to ``output``."""
    Console(width=160).print(make_table(rows))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"suite": suite, "machine": describe_machine(), "rows": rows}, indent=1) + "\n")


def make_table(rows: list[Row]) -> Table:
    """One line per row, sizes as text."""
    columns = list(dict.fromkeys(name for row in rows for name in row if not name.startswith("all_")))
    table = Table()
    for name in columns:
        table.add_column(name.removesuffix("_bytes").replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(show(name, row.get(name)) for name in columns))
    return table


def show(name: str, value: object) -> str:
    if isinstance(value, int):
        return format_bytes(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
