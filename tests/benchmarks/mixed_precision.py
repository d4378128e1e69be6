"""What the precision plugin saves and costs beside Lightning's: python -m tests.benchmarks.mixed_precision.

Bytes are tracked and exact; times are medians of steps, repeats interleaved, as ratios to Lightning's plugin of the
same format in the same run. On a GPU also the allocator's peaks. ``--fake`` tracks shapes of GPU size on fake tensors:
one step in bf16 without dropout, so that attention keeps no probabilities, as on a GPU.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_vram import LeanMixedPrecision, track_memory
from lightning_vram.demos import ByteGPT
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.optimizers.lean.parameters import SCHEMES, LeanParameters
from lightning_vram.techniques.mixed_precision.low_precision_norms import keep_norms_low
from lightning_vram.techniques.mixed_precision.weight_casts import WeightCasts
from tests.benchmarks.cases import WORKLOADS, Workload
from tests.benchmarks.measure import Row, give_back, read_peaks
from tests.benchmarks.micro_batching import NUM_STEPS, NUM_WARM_UP, Bytes, Seconds, fit
from tests.benchmarks.report import report

Make = Callable[[], Any]
RECAST = {"recast_in_backward": True}
WITH_NORMS = {**RECAST, "low_precision_norms": True}


def make_variants(workload: Workload, device: str) -> dict[str, tuple[str, Make]]:
    """By name: the name of the variant that it is compared with, and how its plugin is made."""
    norms = WITH_NORMS if "GPT" in workload.name else RECAST  # there are batch norms only
    bf16, fp16 = "Lightning bf16-mixed", "Lightning 16-mixed"
    variants: dict[str, tuple[str, Make]] = {
        bf16: (bf16, partial(MixedPrecision, "bf16-mixed", device)),
        "bf16": (bf16, partial(LeanMixedPrecision, "bf16")),
        "bf16, recast": (bf16, partial(LeanMixedPrecision, "bf16", **RECAST)),
    }
    if norms is WITH_NORMS:
        variants["bf16, recast, norms"] = (bf16, partial(LeanMixedPrecision, "bf16", **WITH_NORMS))
    for parameters in SCHEMES:
        lean = partial(LeanMixedPrecision, "bf16", parameters=parameters, low_precision_norms=norms is WITH_NORMS)
        variants[parameters] = (bf16, lean)
    if device == "cuda":  # float16 on a CPU is for tests
        variants[fp16] = (fp16, partial(MixedPrecision, "16-mixed", device))
        variants["fp16"] = (fp16, partial(LeanMixedPrecision, "fp16"))
        variants["fp16, recast"] = (fp16, partial(LeanMixedPrecision, "fp16", **norms))
    return variants


def measure(
    workload: Workload, repeats: int, device: torch.device | None = None, names: Iterable[str] | None = None
) -> list[Row]:
    """Compare all plugins, or those of ``names``, which holds what they are compared with."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    variants = make_variants(workload, device.type)
    variants = {name: variants[name] for name in names or variants}
    rows: list[Row] = []
    for name, (_, make) in variants.items():
        tracked = Bytes()
        fit(workload, [tracked], 2, device, plugins=[make()])
        timeline = tracked.tracker.timeline
        rows.append(
            {
                "workload": workload.name,
                "variant": name,
                "activations_bytes": timeline.peak_of(Category.ACTIVATIONS),
                "peak_bytes": timeline.peak_bytes,
            }
        )
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    peaks: dict[str, int] = {}
    for _ in range(repeats):
        for name, (_, make) in variants.items():
            clock = Seconds()
            give_back(device)
            fit(workload, [clock], NUM_STEPS, device, plugins=[make()])
            seconds[name].append(statistics.median(clock.seconds[NUM_WARM_UP:]))
            if device.type != "cpu":
                peaks[name] = read_peaks(device)["max_memory_allocated_bytes"]
    by_name = {row["variant"]: row for row in rows}
    for row in rows:
        plain = by_name[variants[row["variant"]][0]]
        row["peak_of_lightning"] = row["peak_bytes"] / plain["peak_bytes"]
        if peaks:
            row["max_memory_allocated_bytes"] = peaks[row["variant"]]
            row["allocated_of_lightning"] = peaks[row["variant"]] / peaks[plain["variant"]]
        pairs = zip(seconds[row["variant"]], seconds[plain["variant"]], strict=True)
        row["seconds_of_lightning"] = statistics.median([one / other for one, other in pairs]) if repeats else None
    return rows


def track_fake(num_layers: int, *, recast: bool = False, norms: bool = False, parameters: str = "fp32") -> Row:
    """GPT-2 XL over bytes, T 1024, B 4: what the plugin does to the module, without a Trainer."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = ByteGPT(num_layers, 1600, 25, 1024, dropout=0.0)
        tokens = torch.randint(256, (4, 1025))
        if norms:
            keep_norms_low(model, "cpu")
        if recast:
            WeightCasts(model, "cpu", recast_in_backward=True)
        kept = {p for part in model.modules() if isinstance(part, torch.nn.LayerNorm) for p in part.parameters()}
        lean = [p for p in model.parameters() if p not in kept] if parameters != "fp32" else []
        lean_parameters = LeanParameters(lean, parameters if lean else "bf16+split")
        optimizer = torch.optim.AdamW(model.parameters())
        lean_parameters.attach([optimizer])

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with track_memory(model, optimizers=[optimizer], inputs=tokens) as tracker:
            step()
    timeline = tracker.timeline
    return {
        "workload": "ByteGPT GPT-2 XL body, T 1024, B 4, fake tensors",
        "variant": (parameters if lean else "bf16") + ", recast" * recast + ", norms" * norms,
        "activations_bytes": timeline.peak_of(Category.ACTIVATIONS),
        "peak_bytes": timeline.peak_bytes,
    }


def measure_fake(num_layers: int = 48) -> list[Row]:
    variants: list[Row] = [{}, {"recast": True}, {"recast": True, "norms": True}]
    variants += [{"norms": True, "parameters": parameters} for parameters in SCHEMES]
    rows = [track_fake(num_layers, **variant) for variant in variants]
    return [{**row, "peak_of_lightning": row["peak_bytes"] / rows[0]["peak_bytes"]} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.mixed_precision", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; kept under tests/benchmarks/results/")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fake", action="store_true", help="shapes of GPU size, bytes only")
    arguments = parser.parse_args()
    if arguments.fake:
        rows = measure_fake()
    else:
        has_gpu = torch.cuda.is_available()
        rows = [row for one in WORKLOADS if one.needs_gpu == has_gpu for row in measure(one, arguments.repeats)]
    report("mixed_precision", rows, arguments.output)


if __name__ == "__main__":
    main()
