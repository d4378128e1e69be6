"""What becomes of a run with each feature in each context: the table of ``lightning_vram/callbacks/README.md``.

``tests/callbacks/test_contexts.py`` trains with each feature in each context and compares the weights with those of a
run without it. Print the table again with ``PYTHONPATH=.:tests python -m support.contexts``.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from support.helpers import Forking
from support.pages import page_of, title

import lightning_vram as vram

Arguments = dict[str, Any]
HERE = "lightning_vram/callbacks/"
NO_GPU = "FSDP1, DeepSpeed"  # Lightning has them on CUDA only: what we refuse is tested, the rest is not
ACCUMULATION = "gradient accumulation"
CONTEXTS = ["DDP", "FSDP2", NO_GPU, "torch.compile", "manual optimization", ACCUMULATION, "fp16", "CPU"]
TRAINED = [context for context in CONTEXTS if context != NO_GPU]
MOVES = "both strategies move parameters that these features read; use FSDP2"

NO_BUDGET = "but `budget=` is an error with compiled layers"


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def context_arguments(context: str) -> Arguments:
    if context == "DDP":
        return {"strategy": "ddp_fork", "devices": 2}
    if context == "FSDP2":
        return {"strategy": Forking(), "devices": 2}
    if context == ACCUMULATION:
        return {"accumulate_grad_batches": 2}
    return {"plugins": [MixedPrecision("16-mixed", "cpu", _scaler())]} if context == "fp16" else {}


@dataclass(frozen=True)
class Feature:
    make: Callable[[str], Arguments]  # of the Trainer, by context
    outcome: str = "exact"  # in all contexts but those of ``other``
    # outcome and reason, by context; a refusal also has what its message says
    other: dict[str, tuple[str, ...]] = field(default_factory=dict)
    baseline: Callable[[str], Arguments] = lambda context: {}  # of the run that it is compared with

    def outcome_in(self, context: str) -> str:
        default = "untested" if context == NO_GPU else self.outcome
        return self.other.get(context, (default,))[0]


def _callback(kind: Callable[..., Any], *args: Any, outcome: str = "exact", **options: Any) -> Feature:
    other = options.pop("other", {})
    return Feature(lambda context: {"callbacks": [kind(*args, **options)]}, outcome, other)


def _lean(context: str) -> Arguments:
    is_fp16 = context == "fp16"
    plugin = vram.LeanMixedPrecision("fp16", scaler=_scaler()) if is_fp16 else vram.LeanMixedPrecision("bf16")
    return {"plugins": [plugin]}


def _auto(context: str) -> Arguments:
    """Give a budget below what the step needs, so that there is a plan."""
    budget = "2300KiB" if context == "fp16" else "2700KiB"
    return {"callbacks": [vram.AutoVRAM(budget, cache=False)]}


def _offload(context: str) -> Arguments:
    options = {} if context == "CPU" else {"disk_path": tempfile.gettempdir()}
    return {"callbacks": [vram.ActivationOffload("64B", **options)]}


def _compression(context: str) -> Arguments:
    lossy = "int8" if context == "torch.compile" else None
    return {"callbacks": [vram.ActivationCompression(lossy=lossy, min_bytes=1)]}


MOVED = {NO_GPU: ("no", MOVES, "it frees and moves parameters")}
_YOURS = ("no", "your code decides when to step", "does not work with manual optimization")
FEATURES = {
    "AutoVRAM": Feature(_auto),
    "ActivationCheckpointing": _callback(vram.ActivationCheckpointing, other={"torch.compile": ("exact", NO_BUDGET)}),
    "ActivationOffload": Feature(
        _offload,
        other=MOVED | {"CPU": ("no effect", "activations are in host memory already; `disk_path=` moves them to disk")},
    ),
    "ActivationCompression": Feature(
        _compression,
        other=MOVED | {"torch.compile": ("exact", "it compresses only boolean masks, and `lossy=` has no effect")},
    ),
    "InPlaceFusion": _callback(vram.InPlaceFusion, min_bytes=0, other=MOVED),
    "ChunkedLoss": _callback(
        vram.ChunkedLoss,
        chunk=16,
        outcome="lossless",
        other=MOVED | {"torch.compile": ("no effect", "the logits are computed in full")},
    ),
    "TokenTiling": _callback(
        vram.TokenTiling,
        tile=4,
        outcome="lossless",
        other=MOVED | {"torch.compile": ("no effect", "compiled modules are not tiled")},
    ),
    "MicroBatching": _callback(
        vram.MicroBatching,
        2,
        outcome="lossless",
        other=MOVED
        | {
            "manual optimization": (
                "no",
                "your code runs the backward, which cannot be repeated per micro-batch",
                "does not work with manual optimization",
            )
        },
    ),
    "AccumulationScheduler": Feature(
        lambda context: {"callbacks": [vram.AccumulationScheduler(by_epoch={0: 2})]},
        "lossless",
        {
            "manual optimization": _YOURS,
            ACCUMULATION: (
                "no",
                "both set the number; remove `accumulate_grad_batches`",
                "does not work with Trainer(accumulate_grad_batches=2)",
            ),
            NO_GPU: ("untested", "but DeepSpeed and `FSDPStrategy(cpu_offload=True)` are refused"),
        },
        lambda context: {"accumulate_grad_batches": 2},
    ),
    "EarlyRelease": _callback(
        vram.EarlyRelease,
        other={
            "manual optimization": ("no effect", "call `zero_grad()` right after `step()` yourself"),
            NO_GPU: ("untested", "no effect under DeepSpeed, which zeroes gradients itself"),
        },
    ),
    "OptimizerInBackward": _callback(
        vram.OptimizerInBackward,
        other=MOVED
        | {
            "manual optimization": _YOURS,
            "fp16": (
                "no",
                'a GradScaler checks all gradients first; exact with `max_norm="two-pass"`',
                "does not work with a GradScaler",
            ),
        },
    ),
    "MomentsInBF16": _callback(vram.MomentsInBF16, outcome="approximate", other=MOVED),
    "LowBitOptimizer": _callback(vram.LowBitOptimizer, bits=8, outcome="approximate", other=MOVED),
    "LeanMixedPrecision": Feature(
        _lean,
        "exact",
        {NO_GPU: ("no", "both need their own precision plugin; use `Trainer(precision=...)`")},
        lambda context: {} if context == "fp16" else {"precision": "bf16-mixed"},
    ),
    "QuantizeFrozenWeights": _callback(vram.QuantizeFrozenWeights, bits=8, outcome="approximate", other=MOVED),
    "QuantizationAwareTraining": _callback(
        vram.QuantizationAwareTraining,
        "int8",
        outcome="approximate",
        other=MOVED | {"FSDP2": ("no", "the quantization scale needs the whole weight", "a scale is that of")},
    ),
    "FSDPOffloadStrategy": Feature(
        lambda context: {"strategy": vram.FSDPOffloadStrategy(min_params=100), "devices": 1},
        "lossless",
        {
            **dict.fromkeys(("DDP", "FSDP2", NO_GPU), ("strategy",)),
            "torch.compile": ("no", "compile the layers instead of the LightningModule", "Using a compiled model"),
        },
    ),
    "StreamedCheckpointIO": Feature(
        lambda context: {"plugins": [vram.StreamedCheckpointIO(), *context_arguments(context).get("plugins", [])]},
        other={"FSDP2": ("no effect", "Lightning writes folders without the plugin")},
    ),
    "MemoryBudget": _callback(vram.MemoryBudget),
    "VRAMMonitor": _callback(
        vram.VRAMMonitor,
        track=True,
        other={"torch.compile": ("exact", "`track=True` does not see inside compiled code")},
    ),
    "LeakDetector": _callback(vram.LeakDetector),
    "MetricOffload": _callback(vram.MetricOffload, other={"CPU": ("no effect", "metrics are in host memory already")}),
    "EmptyCache": _callback(vram.EmptyCache, other={"CPU": ("no effect", "the CPU allocator has no cache")}),
    "SlurmRequeue": _callback(vram.SlurmRequeue),
}


def as_markdown() -> str:
    rows = [["Feature", *CONTEXTS], ["---"] * (len(CONTEXTS) + 1)]
    for name, feature in FEATURES.items():
        page = title(page_of(name)).removeprefix(HERE).replace("lightning_vram/", "../")
        cells = [feature.outcome_in(context).replace("approximate", "approx.") for context in CONTEXTS]
        rows.append([f"[{name}]({page})", *cells])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    reasons = {}  # contexts and features with the same reason share a line
    for name, feature in FEATURES.items():
        for context, (outcome, *why) in feature.other.items():
            if why:
                reasons.setdefault((context, outcome, why[0]), []).append(f"`{name}`")
    lines = [
        f"- {', '.join(names)}, {context}, *{outcome}*: {why}." for (context, outcome, why), names in reasons.items()
    ]
    return "\n".join([table, "", "Notes on cells (feature, context, *cell*):", "", *lines])


if __name__ == "__main__":
    sys.stdout.write(as_markdown() + "\n")
