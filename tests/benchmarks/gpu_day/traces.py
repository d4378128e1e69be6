"""What the allocator was asked for in small cases, with the phases of the step: an estimator can be held against it."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.benchmarks.cases import WORKLOADS, Workload
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.results import Report
from tests.benchmarks.gpu_day.speed import workload_of
from tests.benchmarks.measure import NUM_WARM_UP, Row, Run, read_peaks

VARIANTS = ("plain", "checkpointed", "checkpointed, matmuls kept", "InPlaceFusion", "offloaded", "compressed")
MAX_ENTRIES = 200_000


def run(setting: Setting, report: Report) -> None:
    """Add a row for each small workload and variant."""
    small = {"gpt": WORKLOADS[0], "images": WORKLOADS[1]}
    if setting.is_tiny:
        small = {"images": workload_of("resnet50_bf16", setting)}
    for name, workload in small.items():
        for variant in VARIANTS:
            report.attempt(f"{name}, {variant}", partial(trace_step, workload, variant, setting))


def trace_step(workload: Workload, variant: str, setting: Setting) -> Row:
    """Record one step of those that are as all later ones."""
    run = Run(workload, variant, setting.device)
    for _ in range(NUM_WARM_UP):
        run.step()
    is_cuda = setting.device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=MAX_ENTRIES)
    ends = []
    loss = run.forward()
    ends.append(_num_entries(setting))
    loss.backward()
    ends.append(_num_entries(setting))
    run.optimizer.step()
    run.optimizer.zero_grad()
    ends.append(_num_entries(setting))
    snapshot: dict[str, Any] = {"device_traces": [[]], "segments": []}
    if is_cuda:
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
    phases = dict(zip(("forward", "backward", "optimizer"), ends, strict=True))
    return {**reduce_trace(snapshot, phases), **read_peaks(setting.device)}


def _num_entries(setting: Setting) -> int:
    """How long the trace is by now."""
    if setting.device.type != "cuda":
        return 0
    return len(torch.cuda.memory._snapshot()["device_traces"][setting.device.index])


def reduce_trace(snapshot: dict[str, Any], ends: dict[str, int]) -> Row:
    """Write a snapshot's trace as text, small enough to keep.

    Args:
        snapshot: Of ``torch.cuda.memory``.
        ends: For each phase the number of entries up to its end.

    Returns:
        For each phase a text: ``+3:512`` is an allocation of 512 bytes, which is called 3; ``-3`` the end of its use,
        ``-:512`` that of one from before the trace; ``S:2097152`` and ``s:2097152`` a segment taken from the device
        and given back. ``@7`` follows what is on another stream than the first entry.
    """
    trace = next((entries for entries in snapshot["device_traces"] if entries), [])
    living: dict[int, int] = {}
    numbers = itertools.count(1)
    phases, start = {}, 0
    for phase, end in ends.items():
        texts = (_write_entry(entry, living, numbers) + _stream_of(entry, trace[0]) for entry in trace[start:end])
        phases[phase] = " ".join(text for text in texts if text[:1] in "+-Ss" and text)
        start = end
    return {"phases": phases, "num_entries": len(trace)}


def _write_entry(entry: Any, living: dict[int, int], numbers: Iterator[int]) -> str:
    match entry["action"]:
        case "alloc":
            living[entry["addr"]] = number = next(numbers)
            return f"+{number}:{entry['size']}"
        case "free_completed":
            number = living.pop(entry["addr"], None)
            return f"-{number}" if number is not None else f"-:{entry['size']}"
        case "segment_alloc" | "segment_map":
            return f"S:{entry['size']}"
        case "segment_free" | "segment_unmap":
            return f"s:{entry['size']}"
    return ""


def _stream_of(entry: Any, first: Any) -> str:
    return "" if entry["stream"] == first["stream"] else f"@{entry['stream']}"


ITEMS = (Item("traces.small", 40, run),)
