"""What estimates are held against: what the allocator was asked for in small cases, and what it took in many."""

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_vram.memory.device.accelerators import VARIABLES
from lightning_vram.memory.estimate.device_spec import DeviceSpec, describe_this_device
from tests.benchmarks.cases import WORKLOADS, Workload
from tests.benchmarks.estimates import measure as estimates
from tests.benchmarks.estimates.cases import CASES
from tests.benchmarks.estimates.measure import measure_all
from tests.benchmarks.gpu_day import results
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.results import Report
from tests.benchmarks.gpu_day.speed import CHECKPOINTED, FUSED, MATMULS, OFFLOADED, PLAIN, workload_of
from tests.benchmarks.measure import NUM_WARM_UP, Row, Run, read_peaks
from tests.benchmarks.ours import find_way
from tests.benchmarks.trace_text import reduce_trace

VARIANTS = (PLAIN, CHECKPOINTED, MATMULS, FUSED, OFFLOADED, "ActivationCompression()")
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
    run = Run(workload, find_way(variant), setting.device)
    for _ in range(NUM_WARM_UP):
        run.step()
    is_cuda = setting.device.type == "cuda"
    start = []
    if is_cuda:
        torch.cuda.synchronize()
        start = [one for one in torch.cuda.memory._snapshot()["segments"] if one["device"] == setting.device.index]
        torch.cuda.reset_peak_memory_stats()
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
    settings = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    return {**reduce_trace(snapshot, phases, start), "settings": settings, **read_peaks(setting.device)}


def _num_entries(setting: Setting) -> int:
    """How long the trace is by now."""
    if setting.device.type != "cuda":
        return 0
    return len(torch.cuda.memory._snapshot()["device_traces"][setting.device.index])


def run_peaks(setting: Setting, report: Report, *, case: str) -> None:
    """Add the allocator's peaks of one case; :func:`estimate_peaks` compares them, on a machine that is not lent."""
    report.set(device_spec=asdict(describe_this_device()))
    report.attempt(case, lambda: {"all_steps": estimates.train(case)})


def estimate_peaks(folder: Path) -> None:
    """Add to the peaks in ``folder`` what is estimated for the device that had them; needs no GPU, and its torch."""
    for item in PEAKS:
        result = results.read(folder, item.name)
        if result is None or result["status"] != "done" or "error" in result["rows"][0]:
            continue
        row, spec = result["rows"][0], result["device_spec"]
        if result["machine"]["torch"].partition("+")[0] != torch.__version__.partition("+")[0]:
            print(f"{item.name}: measured with torch {result['machine']['torch']}, estimated with {torch.__version__}")
        spec = DeviceSpec(**{name: tuple(value) if isinstance(value, list) else value for name, value in spec.items()})
        row |= estimates.summarize(row["all_steps"], estimates.estimate(row["name"], spec))
        results.write(folder, item.name, result)


def run_estimates(setting: Setting, report: Report) -> None:
    """Add a row for each case of ``estimate_memory`` beside the allocator; each has a process of its own."""
    for row in measure_all(CASES):
        report.add(row)


_CASES = (  # none in float16: weights are left as they are, whose infinite gradients GradScaler would skip
    *("gpt, fp32", "gpt, bf16-mixed", "gpt, checkpointed", "gpt, offloaded", "gpt, fused", "gpt, fsdp_offload"),
    *("wide gpt, bf16-mixed", "wide gpt, fused AdamW", "wide gpt, fsdp_offload_optimizer", "long gpt, bf16-mixed"),
    *("resnet, bf16-mixed", "resnet, fused", "vit, bf16-mixed", "vit, fused", "llama, bf16-mixed"),
    "llama, checkpointed",
)
PEAKS = tuple(
    Item(
        f"peaks.{case.replace(', ', '.').replace(' ', '_')}",
        12,
        partial(run_peaks, case=case),
        shares=True,
        needs_cuda=True,
    )
    for case in _CASES
)
ITEMS = (Item("estimate.allocator", 500, run_estimates, needs_cuda=True), Item("traces.small", 40, run))
