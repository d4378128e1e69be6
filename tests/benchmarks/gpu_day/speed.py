"""Kept bytes, peaks and step times: a part beside plain or beside another's way to the same end, in turns."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from lightning_vram.demos import ByteGPT, DigitsResNet
from tests.benchmarks.cases import GPU_WORKLOADS, Workload
from tests.benchmarks.compare import measure_ways, sum_up
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.results import Report
from tests.benchmarks.measure import NUM_WARM_UP, Row, take_turn, track_step
from tests.benchmarks.ours import find_way
from tests.benchmarks.peers import pytorch
from tests.benchmarks.ways import Way
from tests.benchmarks.whole_runs import Steps, run_whole
from tests.support.networks import ViT

PLAIN, BY_HAND, SELECTIVE = "plain", pytorch.CHECKPOINT.name, pytorch.SELECTIVE.name
SAVED_ON_CPU = pytorch.SAVE_ON_CPU.name
COMPILED = tuple(way.name for way in pytorch.COMPILED)
CHECKPOINTED, MATMULS = "ActivationCheckpointing()", 'ActivationCheckpointing(save="matmuls")'
FUSED, OFFLOADED = "InPlaceFusion()", 'ActivationOffload("64KiB")'
BESIDE = f"{CHECKPOINTED}, {OFFLOADED}"
COMPRESSED, HALF = "ActivationCompression()", "ActivationCheckpointing(budget=...), 0.5 of plain"


def workload_of(key: str, setting: Setting) -> Workload:
    """Return one of ``GPU_WORKLOADS``, or a toy of its kind."""
    workload = GPU_WORKLOADS[key]
    if not setting.is_tiny:
        return workload
    if key.startswith("gpt"):
        return replace(workload, make_model=partial(ByteGPT, 2, 32, 2, 32), make_batch=_tiny_tokens)
    make_model = partial(ViT, 32, 2, 2, 32) if key.startswith("vit") else partial(DigitsResNet, (2, 2), 4, 3)
    return replace(workload, make_model=make_model, make_batch=_tiny_images)


def _tiny_tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randint(256, (4, 33)),)


def _tiny_images() -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 3, 32, 32), torch.randint(10, (4,))


def run(
    setting: Setting,
    report: Report,
    *,
    key: str,
    variants: Sequence[str],
    repeats: int = 5,
    steps: int = 10,
) -> None:
    """Add a row for each variant, compared with the first, and one for the tracked bytes of each."""
    workload = workload_of(key, setting)
    if setting.is_tiny:
        repeats, steps = 1, 1
    ways = [find_way(variant) for variant in variants]
    rows = measure_ways(workload, ways, setting.device, repeats=repeats, steps=steps, is_tracked=False)
    report.add(*({"name": row["variant"], **row} for row in rows))
    for row, way in zip(rows, ways, strict=True):
        if "error" not in row and way.is_trackable:  # what does not fit needs no second try
            report.attempt(f"{way.name}, tracked", partial(track_step, workload, way, setting.device))


def run_once(setting: Setting, report: Report, *, key: str, variants: Sequence[str], steps: int) -> None:
    """Add a row for each variant, one turn of each."""
    measure_each(setting, report, workload_of(key, setting), [find_way(variant) for variant in variants], steps)


def measure_each(setting: Setting, report: Report, workload: Workload, ways: Sequence[Way], steps: int) -> None:
    """Add a row for each way as soon as it is measured: whatever happens to one, the others have theirs.

    The first way runs once more at the end, as a control: how far it is from itself.
    """
    names = [*(way.name for way in ways), f"{ways[0].name}, again"]
    for name, way in zip(names, (*ways, ways[0]), strict=True):
        report.attempt(name, partial(_measure, workload, way, setting, 1 if setting.is_tiny else steps))


def _measure(workload: Workload, way: Way, setting: Setting, steps: int) -> Row:
    if (why := way.why_not(setting.device)) is not None:
        return {"skipped": why}
    if way.is_whole:
        turn = run_whole(workload, way, setting.device, Steps(steps), NUM_WARM_UP + steps)
    else:
        turn = take_turn(workload, way, setting.device, steps, 0)
    return {"workload": workload.name, "by": way.by, **sum_up([turn], [])}


def _item(key: str, name: str, seconds: float, *variants: str, steps: int = 10, repeats: int = 5) -> Item:
    measure = partial(run, key=key, variants=variants, steps=steps, repeats=repeats)
    needs_cuda = not set(variants).isdisjoint(COMPILED)
    return Item(f"speed.{key}.{name}", seconds, measure, needs_cuda=needs_cuda)


def _once(key: str, seconds: float, *variants: str, steps: int) -> Item:
    return Item(f"speed.{key}", seconds, partial(run_once, key=key, variants=variants, steps=steps), row_seconds=45)


_COMMON = (PLAIN, BY_HAND, CHECKPOINTED, SELECTIVE, MATMULS, FUSED, BESIDE)
XL = _once("gpt2_xl", 33, *_COMMON, steps=4)
SMALL = _once("gpt2_small", 25, *_COMMON, OFFLOADED, SAVED_ON_CPU, HALF, steps=10)
WIDE = _once("gpt_wide", 40, *_COMMON, OFFLOADED, steps=4)  # kernels outlast the host's work
IMAGES = _once("resnet50_bf16", 25, PLAIN, FUSED, BY_HAND, CHECKPOINTED, OFFLOADED, COMPRESSED, steps=6)
WITH_GOALS = (
    _item("resnet50_bf16", "fusion", 30, PLAIN, FUSED),
    _item("gpt2_xl", "checkpointing", 60, BY_HAND, CHECKPOINTED, steps=5),
    _item("gpt2_xl", "matmuls", 55, SELECTIVE, MATMULS, steps=5),
    _item("gpt2_xl", "offload_beside", 60, CHECKPOINTED, BESIDE, steps=5),
    _item("gpt2_xl", "offload", 60, PLAIN, OFFLOADED, steps=5),
    _item("resnet50_fp32", "fusion", 40, PLAIN, FUSED),
    _item("gpt2_small", "checkpointing", 20, BY_HAND, CHECKPOINTED, steps=20),
    _item("gpt2_small", "matmuls", 20, SELECTIVE, MATMULS, steps=20),
    _item("gpt2_small", "offload_beside", 20, CHECKPOINTED, BESIDE, steps=20),
    _item("gpt2_small", "offload", 25, PLAIN, OFFLOADED, SAVED_ON_CPU),
)
OTHERS = (
    _item("vit_b", "parts", 45, PLAIN, BY_HAND, CHECKPOINTED, FUSED, OFFLOADED, repeats=3),
    _item(
        "gpt2_small",
        "parts",
        60,
        PLAIN,
        CHECKPOINTED,
        "ActivationCheckpointing(every_n_layers=2)",
        HALF,
        FUSED,
        'InPlaceFusion(), ActivationOffload("64KiB")',
        COMPRESSED,
        'ActivationCompression(lossy="int8")',
        repeats=3,
    ),
    _item(
        "resnet50_bf16",
        "parts",
        60,
        PLAIN,
        BY_HAND,
        CHECKPOINTED,
        OFFLOADED,
        'InPlaceFusion(), ActivationOffload("64KiB")',
        COMPRESSED,
        repeats=3,
    ),
    _item("gpt2_xl", "save_on_cpu", 60, PLAIN, SAVED_ON_CPU, steps=3, repeats=2),
    _item("gpt2_small", "compile", 100, PLAIN, *COMPILED, repeats=1),
    _item("vit_b", "compile", 80, PLAIN, *COMPILED, repeats=1),
)
