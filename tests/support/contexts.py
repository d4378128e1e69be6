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
from lightning.pytorch.strategies import ModelParallelStrategy
from support.pages import page_of, title

import lightning_vram as vram

Arguments = dict[str, Any]
HERE = "lightning_vram/callbacks/"
NO_GPU = "FSDP1, DeepSpeed"  # Lightning has them on CUDA only: what we refuse is tested, the rest is not
CONTEXTS = ["CPU", "DDP", "FSDP2", NO_GPU, "torch.compile", "manual optimization", "accumulation", "fp16", "MPS"]
TRAINED = [context for context in CONTEXTS if context not in (NO_GPU, "MPS")]
MOVES = "both strategies free or move parameters that these features read; use FSDP2 (`ModelParallelStrategy`)"


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def context_arguments(context: str) -> Arguments:
    """Return the Trainer's arguments that a context is made of."""
    if context == "DDP":
        return {"strategy": "ddp_fork", "devices": 2}
    if context == "FSDP2":
        return {"strategy": ModelParallelStrategy(1, 1), "devices": 1}
    if context == "accumulation":
        return {"accumulate_grad_batches": 2}
    return {"plugins": [MixedPrecision("16-mixed", "cpu", _scaler())]} if context == "fp16" else {}


@dataclass(frozen=True)
class Feature:
    """A feature, and what it promises.

    Args:
        make: Returns the Trainer's arguments that switch it on.
        outcome: In all contexts but those of ``other``.
        other: Outcome and reason, by context; a refusal also has what its message says.
        baseline: Returns arguments of the run that it is compared with, by context.
    """

    make: Callable[[str], Arguments]
    outcome: str = "exact"
    other: dict[str, tuple[str, ...]] = field(default_factory=dict)
    baseline: Callable[[str], Arguments] = lambda context: {}

    def outcome_in(self, context: str) -> str:
        """Return the cell of the table."""
        default = "untested" if context in (NO_GPU, "MPS") else self.outcome
        return self.other.get(context, (default,))[0]


def _callback(kind: Callable[..., Any], *args: Any, outcome: str = "exact", **options: Any) -> Feature:
    other = options.pop("other", {})
    return Feature(lambda context: {"callbacks": [kind(*args, **options)]}, outcome, other)


def _lean(context: str) -> Arguments:
    is_fp16 = context == "fp16"
    plugin = vram.LeanMixedPrecision("fp16", scaler=_scaler()) if is_fp16 else vram.LeanMixedPrecision("bf16")
    return {"plugins": [plugin]}


MOVED = {NO_GPU: ("no", MOVES, "it frees and moves parameters")}
FEATURES = {
    "AutoVRAM": _callback(vram.AutoVRAM),
    "ActivationCheckpointing": _callback(vram.ActivationCheckpointing),
    "ActivationOffload": _callback(vram.ActivationOffload, "64B", disk_path=tempfile.gettempdir(), other=MOVED),
    "ActivationCompression": _callback(vram.ActivationCompression, min_bytes=0, other=MOVED),
    "InPlaceFusion": _callback(vram.InPlaceFusion, min_bytes=0, other=MOVED),
    "ChunkedLoss": _callback(
        vram.ChunkedLoss,
        chunk=16,
        outcome="lossless",
        other=MOVED | {"torch.compile": ("no effect", "the compiler hides the head, so logits are computed in full")},
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
                "your code runs forward and backward, so they cannot be repeated per micro-batch",
                "does not work with manual optimization",
            )
        },
    ),
    "AccumulationScheduler": Feature(
        lambda context: {"callbacks": [vram.AccumulationScheduler(by_epoch={0: 2})]},
        "lossless",
        {
            "manual optimization": (
                "no",
                "your code decides when to step",
                "does not work with manual optimization",
            ),
            "accumulation": (
                "no",
                "give the number to the callback, not to `accumulate_grad_batches`",
                "does not work with Trainer(accumulate_grad_batches=2)",
            ),
            NO_GPU: (
                "untested",
                "DeepSpeed and `FSDPStrategy(cpu_offload=True)` accumulate by themselves and are refused",
            ),
        },
        lambda context: {"accumulate_grad_batches": 2},
    ),
    "EarlyRelease": _callback(vram.EarlyRelease),
    "OptimizerInBackward": _callback(
        vram.OptimizerInBackward,
        other=MOVED
        | {
            "manual optimization": (
                "no",
                "your code decides when to step",
                "does not work with manual optimization",
            ),
            "fp16": (
                "no",
                'a GradScaler checks all gradients before the step; `max_norm="two-pass"` is exact with fp16',
                "does not work with a GradScaler",
            ),
        },
    ),
    "MomentsInBF16": _callback(vram.MomentsInBF16, outcome="approximate", other=MOVED),
    "LowBitOptimizer": _callback(vram.LowBitOptimizer, bits=8, outcome="approximate", other=MOVED),
    "LeanMixedPrecision": Feature(
        _lean,
        "exact",
        {NO_GPU: ("untested", "DeepSpeed, which casts, scales and clips by itself, is refused; FSDP1 is untested")},
        lambda context: {} if context == "fp16" else {"precision": "bf16-mixed"},
    ),
    "QuantizeFrozenWeights": _callback(vram.QuantizeFrozenWeights, bits=8, outcome="approximate", other=MOVED),
    "QuantizationAwareTraining": _callback(
        vram.QuantizationAwareTraining,
        "int8",
        outcome="approximate",
        other=MOVED
        | {
            "FSDP2": (
                "no",
                "the quantization scale needs the whole weight, and each rank has a shard",
                "a scale is that of",
            )
        },
    ),
    "FSDPOffloadStrategy": Feature(
        lambda context: {"strategy": vram.FSDPOffloadStrategy(min_params=100), "devices": 1},
        "lossless",
        {
            **dict.fromkeys(("DDP", "FSDP2", NO_GPU), ("strategy", "a Trainer has one strategy")),
            "torch.compile": ("no", "compile the layers instead of the LightningModule", "Using a compiled model"),
        },
    ),
    "StreamedCheckpointIO": Feature(
        lambda context: {"plugins": [vram.StreamedCheckpointIO(), *context_arguments(context).get("plugins", [])]}
    ),
    "MemoryBudget": _callback(vram.MemoryBudget),
    "VRAMMonitor": _callback(vram.VRAMMonitor, track=True),
    "LeakDetector": _callback(vram.LeakDetector),
    "MetricOffload": _callback(vram.MetricOffload),
    "EmptyCache": _callback(vram.EmptyCache),
    "SlurmRequeue": _callback(vram.SlurmRequeue),
}


def as_markdown() -> str:
    """Return the table, and the reasons under it."""
    rows = [["Feature", *CONTEXTS], ["---"] * (len(CONTEXTS) + 1)]
    for name, feature in FEATURES.items():
        page = title(page_of(name)).removeprefix(HERE).replace("lightning_vram/", "../")
        cells = [feature.outcome_in(context).replace("approximate", "approx.") for context in CONTEXTS]
        rows.append([f"[{name}]({page})", *cells])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    reasons = {}  # contexts and features with the same reason share a line
    for name, feature in FEATURES.items():
        for context, (outcome, *why) in feature.other.items():
            reasons.setdefault((context, outcome, why[0]), []).append(f"`{name}`")
    lines = [
        f"- **{context}: {outcome}** for {', '.join(names)}: {why}."
        for (context, outcome, why), names in reasons.items()
    ]
    return "\n".join([table, "", *sorted(lines)])


if __name__ == "__main__":
    sys.stdout.write(as_markdown() + "\n")
