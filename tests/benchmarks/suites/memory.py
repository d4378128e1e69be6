"""Tracked bytes of one step, all activation techniques: exact, the same on every machine.

Those of ``fsdp_offload`` are not: threads free memory beside the step. On a CPU they have what it keeps on the host.
The exact ones of the small workloads are held in ``golden_bytes.json`` for each minor version of torch.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.compare import Options, measure_ways
from tests.benchmarks.measure import Row
from tests.benchmarks.ours import FROZEN, OURS
from tests.benchmarks.suites import strategies
from tests.benchmarks.ways import PLAIN

SETTINGS: dict[str, Any] = {"renew_golden": False}
QUICK: dict[str, Any] = {}
GOLDEN = Path(__file__).parents[1] / "golden_bytes.json"
RENEWAL = "python -m tests.benchmarks --suite memory --quick --renew-golden"
WAYS = (*OURS, strategies.MODES[0], *strategies.LESS_ON_HOST)
_EXACT = {PLAIN.name, *(way.name for way in (*OURS, *FROZEN))}
_HELD = ("peak_bytes", "saved_for_backward_bytes", "activations_peak_bytes")

Golden = dict[str, dict[str, dict[str, int]]]  # by workload, way and name


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each workload and way."""
    rows = []
    for workload, ways in options.pairs("memory", WAYS):
        found = measure_ways(workload, ways, options.device, repeats=0, steps=0)
        yield from found
        rows += found
    if options["renew_golden"]:
        renew_golden(rows, options)


def golden_of(rows: list[Row]) -> Golden:
    """Return what is held of rows."""
    found: Golden = {}
    for row in (row for row in rows if row["variant"] in _EXACT):
        held = {name.removesuffix("_bytes"): row[name] for name in _HELD}
        found.setdefault(row["workload"], {})[row["variant"]] = held
    return found


def read_golden() -> dict[str, Golden]:
    """Return what is held, by minor version of torch."""
    found: dict[str, Golden] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    return found


def minor_version() -> str:
    """Return this torch's, such as ``2.13``."""
    return ".".join(torch.__version__.split(".")[:2])


def renew_golden(rows: list[Row], options: Options) -> None:
    """Write this version's integers.

    Raises:
        ValueError: If not all of them are in ``rows``.
    """
    if not options.is_quick or options.only or options.ways or options.has_peers or options.device.type != "cpu":
        raise ValueError(f"--renew-golden needs all small workloads on a CPU and no peers: {RENEWAL}.")
    held = {**read_golden(), minor_version(): golden_of(rows)}
    GOLDEN.write_text(json.dumps(dict(sorted(held.items())), indent=1) + "\n")
