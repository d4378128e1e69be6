"""A page about memory that ran out: what held it, why there was not enough, and what would help."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import torch

from lightning_vram.memory.device.accelerators import SETTING, VARIABLES, supports_expandable_segments
from lightning_vram.memory.device.out_of_memory import FailedRequest, OutOfMemorySource
from lightning_vram.memory.units import MIB, format_bytes
from lightning_vram.report.plan import Choice, cells
from lightning_vram.report.tables import label


class Work(StrEnum):
    """What was being done."""

    MOVING = "moving the weights to the device"
    RESTORING = "restoring a checkpoint"
    SAVING = "saving a checkpoint"
    FORWARD = "the forward"
    BACKWARD = "the backward"
    OPTIMIZER_STEP = "the optimizer's step"
    EPOCH_END = "the end of the epoch"
    OTHER = "other code"


@dataclass(frozen=True)
class Place:
    """Where the out-of-memory error was raised."""

    work: Work
    module: str = ""  # innermost one of the model that was running; empty: none
    line: str = ""  # of the user's code, as "file:line: text"; empty: unknown
    function: str = ""  # innermost in Python


_MANY_BATCHES, _MOSTLY = 8, 0.75
_GROWN_SHARE = 0.05  # of what there is


@dataclass
class OutOfMemory:
    """What is known of an out-of-memory error."""

    message: str
    source: OutOfMemorySource
    device: str
    request: FailedRequest
    stage: str  # as in "train, epoch 0, batch 17"
    place: Place
    by_category: dict[str, int] = field(default_factory=dict)  # bytes on the device
    by_module: dict[str, int] = field(default_factory=dict)  # bytes on the device, the largest first
    foreign_bytes: int = 0  # in tensors of this process that a step of the run does not have; 0: unknown
    growth: tuple[tuple[int, int], ...] = ()  # batches of the stage so far, and bytes in tensors at their ends
    remedies: Sequence[Choice] = ()  # this run, and configurations that need less, by the code to paste
    no_remedies: str = ""  # why there are none, if there are none
    cut: str = ""  # what ended the estimates of remedies early; empty: nothing
    budget_bytes: int | None = None  # that the step may use; None: unknown
    shares_host_memory: bool = False  # whether the device does
    may_view_buckets: bool = False  # whether gradients are not views of DDP's buckets, and may be

    @property
    def kind(self) -> str:
        """The kind of the device, such as ``"cuda"``."""
        return self.device.partition(":")[0]

    @property
    def is_training(self) -> bool:
        """Whether it was a training batch."""
        return self.stage.startswith("train")

    @property
    def leaked_bytes(self) -> int | None:
        """Bytes by which each of the last batches has left more than the one before; ``None``: no growth."""
        if len(self.growth) < _MANY_BATCHES:
            return None
        sizes = [num_bytes for _, num_bytes in self.growth]
        num_up = sum(after > before for before, after in pairwise(sizes))
        grown_bytes = sizes[-1] - sizes[0]
        room_bytes = self.request.room_bytes or sizes[-1]
        if num_up < _MOSTLY * (len(sizes) - 1) or grown_bytes < _GROWN_SHARE * room_bytes:
            return None
        return grown_bytes // max(1, self.growth[-1][0] - self.growth[0][0])


_LOSS_FUNCTIONS = ("cross_entropy", "log_softmax", "nll_loss")
_LARGE_SHARE = 0.1  # of a device: a desktop has less


Hint = str | Callable[[OutOfMemory], str]  # a function returns the text; empty: it does not help


@dataclass(frozen=True)
class Cause:
    """A cause of an out-of-memory error."""

    title: str
    holds: Callable[[OutOfMemory], bool]
    hints: tuple[Hint, ...]  # the best first
    meaning: Callable[[OutOfMemory], str] = lambda found: ""
    needs_leaner_step: bool = True  # a step that needs less cures it, not only delays it

    def helps(self, found: OutOfMemory) -> list[str]:
        """Return the hints that apply, the best first."""
        return [text for hint in self.hints if (text := hint if isinstance(hint, str) else hint(found))]


def find_cause(found: OutOfMemory) -> Cause:
    """Return the first of the causes below that holds."""
    return next(cause for cause in CAUSES if cause.holds(found))


def _is_others_fault(found: OutOfMemory) -> bool:
    """Whether others have a large part, without which the request would have been granted."""
    request = found.request
    asked_bytes, free_bytes, other_bytes = request.asked_bytes or 0, request.free_bytes or 0, request.other_bytes
    if request.limit_bytes is not None and asked_bytes <= free_bytes:
        return False  # enough was free: it was this process's own limit
    is_large = other_bytes > 0 and other_bytes >= _LARGE_SHARE * (request.total_bytes or 0)
    return is_large and asked_bytes <= free_bytes + other_bytes


def _describe_growth(found: OutOfMemory) -> str:
    return f"Each of the last batches left {format_bytes(found.leaked_bytes or 0)} more than the one before."


def _if_host_has_more(text: str) -> Hint:
    """Return a hint to move something to the host, for devices with memory of their own."""
    return lambda found: "" if found.shares_host_memory else text


def _bucket_views(found: OutOfMemory) -> str:
    line = "strategy=DDPStrategy(gradient_as_bucket_view=True), callbacks=[EarlyRelease()]"
    return f"gradients in DDP's buckets only, 4 bytes per parameter less: `{line}`" if found.may_view_buckets else ""


def _monitor(found: OutOfMemory) -> str:
    """Return the command that lists the processes of a device."""
    if found.kind == "cuda" and torch.version.hip is not None:
        return "amd-smi process"
    return {"cuda": "nvidia-smi", "xpu": "xpu-smi ps"}.get(found.kind, "top")


def _expandable_segments(found: OutOfMemory) -> str:
    if found.kind != "cuda" or not supports_expandable_segments():
        return ""
    return (
        f"expandable segments: `{VARIABLES[1]}={SETTING}` in the environment, or `configure_allocator()` first in the "
        "program"
    )


_SMALLER = (
    "the fastest configuration that fits: `callbacks=[AutoVRAM()]`",
    _bucket_views,
    "a smaller batch, the same effective batch size: `callbacks=[AccumulationScheduler(target_batch_size=...)]`",
)
_STATES = (
    _if_host_has_more('weights and optimizer state on the host: `strategy="fsdp_offload"`'),
    _bucket_views,
    '16-bit weights and optimizer state: `plugins=[LeanMixedPrecision("bf16", parameters="bf16+kahan")]`',
)
_COLLECTED = (
    _if_host_has_more("metric lists on the CPU: `callbacks=[MetricOffload()]`"),
    _if_host_has_more("outputs on the CPU: `self.outputs.append(output.detach().cpu())`"),
    "predictions written batch by batch, by a `BasePredictionWriter`: `trainer.predict(..., return_predictions=False)`",
)
CAUSES = (
    Cause(
        "the host ran out of memory",
        lambda found: found.source is OutOfMemorySource.HOST and found.device != "cpu",
        (
            "fewer data loader workers, less prefetching: `num_workers`, `prefetch_factor`, `pin_memory`",
            "optimizer state on disk: `strategy=FSDPOffloadStrategy(nvme_path=...)`",
            "checkpoints without a second copy in host memory: `plugins=[StreamedCheckpointIO()]`",
            "more memory for the job: `#SBATCH --mem=...`",
        ),
        lambda found: "Not the device: the memory of the machine or of the job is used up.",
        needs_leaner_step=False,
    ),
    Cause(
        "a memory leak: memory grew with each batch",
        lambda found: found.is_training and found.leaked_bytes is not None,
        (
            "find the attribute that holds it: `callbacks=[LeakDetector()]`",
            "store numbers, not tensors with their autograd graph: `self.losses.append(loss.detach())`, or "
            "`loss.item()`",
        ),
        _describe_growth,
        needs_leaner_step=False,
    ),
    Cause(
        "outputs or metric lists, collected over the batches",
        lambda found: found.place.work is Work.EPOCH_END or (not found.is_training and found.leaked_bytes is not None),
        _COLLECTED,
        lambda found: (
            "Collected outputs are in memory twice while they are concatenated at the end of the epoch."
            if found.leaked_bytes is None
            else _describe_growth(found)
        ),
        needs_leaner_step=False,
    ),
    Cause(
        "another process is on the device",
        _is_others_fault,
        (
            lambda found: f"find the process, and end it if it is yours: `{_monitor(found)}`",
            "a configuration that fits the rest: `callbacks=[AutoVRAM()]`",
        ),
        lambda found: (
            f"Other processes{', and this one on the host,' * found.shares_host_memory} used "
            f"{format_bytes(found.request.other_bytes)} of the device. Without them the memory would have been enough."
        ),
        needs_leaner_step=False,
    ),
    Cause(
        "a checkpoint was a second copy of the model",
        lambda found: found.place.work in (Work.RESTORING, Work.SAVING),
        (
            "an empty cache before: `callbacks=[EmptyCache()]`",
            'sharded checkpoints: `strategy=FSDPOffloadStrategy(state_dict_type="sharded")`',
        ),
        lambda found: "Weights and optimizer state were on the device twice while it was read or written.",
    ),
    Cause(
        "fragmentation: enough memory was free, but not in one block",
        lambda found: 0 < (found.request.asked_bytes or 0) <= (found.request.cached_bytes or 0),
        (
            _expandable_segments,
            "an empty cache at each switch between training and validation: `callbacks=[EmptyCache()]`",
        ),
        lambda found: (
            f"{format_bytes(found.request.cached_bytes or 0)} were reserved but not allocated, in blocks that were "
            f"each too small for {format_bytes(found.request.asked_bytes or 0)}."
        ),
        needs_leaner_step=False,
    ),
    Cause(
        "other tensors of this process are on the device",
        lambda found: found.foreign_bytes > 0,
        (
            lambda found: (
                "delete what earlier runs have left: `del model, trainer`, then `gc.collect()` and "
                f"`torch.{found.kind}.empty_cache()`; restart the kernel of a notebook"
            ),
            "a configuration that fits the rest: `callbacks=[AutoVRAM()]`",
        ),
        lambda found: f"{format_bytes(found.foreign_bytes)} are in tensors that do not belong to this run.",
        needs_leaner_step=False,
    ),
    Cause(
        "the weights alone do not fit",
        lambda found: found.place.work is Work.MOVING,
        _STATES,
        lambda found: "In training, gradients and optimizer state need memory in addition.",
    ),
    Cause(
        "the optimizer state does not fit",
        lambda found: found.place.work is Work.OPTIMIZER_STEP,
        _STATES,
        lambda found: "Adam allocates two moments per weight in its first step.",
    ),
    Cause(
        "a validation, test or prediction batch is too large",
        lambda found: not found.is_training,
        (
            'smaller batches: `callbacks=[MicroBatching(eval="auto")]`, or a smaller `batch_size` of that data loader',
            "an empty cache before it: `callbacks=[EmptyCache()]`",
            _if_host_has_more("metric lists on the CPU: `callbacks=[MetricOffload()]`"),
        ),
    ),
    Cause(
        "the logits, and the loss over them",
        lambda found: found.place.function in _LOSS_FUNCTIONS,
        ("smaller micro-batches, and so smaller logits: `callbacks=[MicroBatching(...)]`", *_SMALLER),
        lambda found: "Tensors of samples x positions x classes, some in float32, are a large share of the step.",
    ),
    Cause(
        "the batch is too large: saved activations",
        lambda found: found.place.work in (Work.FORWARD, Work.BACKWARD),
        _SMALLER,
    ),
    Cause("the run needs more memory than available", lambda found: True, _SMALLER),
)


_MOST_MODULES = 8
_MOST_READINGS = 8
_PICTURE = (
    "![A step of this run on fake tensors]({name})\n\nAvailable to this step: the memory that its tensors may use. "
    "Other tensors and processes are subtracted; it is at most the estimated peak of the step minus the bytes asked "
    "for."
)
_SNAPSHOT = "- [{name}]({name}): blocks of the allocator, for https://pytorch.org/memory_viz"


def page(found: OutOfMemory, pictures: Sequence[str] = ()) -> str:
    """Return the page; of ``pictures``, one may be a snapshot of the allocator."""
    cause = find_cause(found)
    step = max(1, len(found.growth) // _MOST_READINGS)
    growth = [(str(batch), format_bytes(size)) for batch, size in found.growth[::-1][::step][::-1]]
    kinds = [(label(name), size) for name, size in found.by_category.items() if size]
    total = sum(found.by_category.values())

    def shares(head: str, sizes: Sequence[tuple[str, int]]) -> str:
        rows = [(name or "(none)", format_bytes(size), f"{size / total:.0%}") for name, size in sizes]
        return _table((head, "bytes", "share"), *rows) if rows else ""

    sections = {
        "What helps": _remedies(found, cause),
        "What held the memory": _paragraphs(
            shares("for", kinds), shares("module", list(found.by_module.items())[:_MOST_MODULES])
        ),
        "At the ends of the last batches": _table(("batch", "in tensors"), *growth) if len(growth) > 1 else "",
    }
    return (
        _paragraphs(
            f"# Out of memory: {cause.title}",
            cause.meaning(found),
            _facts(found),
            *(f"## {title}\n\n{text}" for title, text in sections.items() if text),
            *((_PICTURE if name.endswith(".png") else _SNAPSHOT).format(name=name) for name in pictures),
            f"## The error\n\n```text\n{found.message.strip()}\n```",
        )
        + "\n"
    )


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def summary(found: OutOfMemory) -> str:
    """Return the cause, and what helps best, in a sentence."""
    cause = find_cause(found)
    best = next((choice for choice in found.remedies if choice.is_plan), None)
    helps = best.name if best is not None and cause.needs_leaner_step else cause.helps(found)[0]
    return f"{cause.title}. What helps: {helps}. {found.cut}".rstrip()


def _facts(found: OutOfMemory) -> str:
    request, place = found.request, found.place
    rows = [("when", found.stage), ("where", f"{place.work}{f' of `{place.module}`' if place.module else ''}")]
    rows += [("your line", f"`{place.line}`")] if place.line else []
    sizes = {
        "asked for": request.asked_bytes,
        f"{found.device} has": request.total_bytes,
        "limit of this process": request.limit_bytes,
        "free": request.free_bytes,
        "in tensors of this process": request.allocated_bytes,
        "reserved by it, not allocated": request.cached_bytes,
    }
    # sizes in messages have two decimals: their differences may be nothing
    differences = {"used by the driver for it": request.driver_bytes, "used by other processes": request.other_bytes}
    sizes |= {name: size for name, size in differences.items() if size > MIB}
    return _table(("", ""), *rows, *((name, format_bytes(size)) for name, size in sizes.items() if size is not None))


def _remedies(found: OutOfMemory, cause: Cause) -> str:
    listed = "\n".join(f"- {hint}" for hint in cause.helps(found))
    if not found.remedies:
        reason = f"The saving of each feature was not estimated: {found.no_remedies}" if found.no_remedies else ""
        return _paragraphs(listed, reason or found.cut)
    table = _table(*cells(found.remedies, "line to paste"))
    note = "Estimated with steps of this run, and the batch that ran out of memory, on fake tensors."
    if any(choice.is_plan for choice in found.remedies):
        note = f"\\* recommended. {note}"
    note += f" {found.cut}" if found.cut else ""
    return _paragraphs(*([table, note, "Or:", listed] if cause.needs_leaner_step else [listed, table, note]))


def _table(head: Sequence[str], *rows: Sequence[str]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
