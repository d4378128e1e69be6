"""A page about an out-of-memory error: what held the memory, the cause, and what helps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from lightning_vram.memory.device.failed_request import FailedRequest
from lightning_vram.memory.device.out_of_memory import OutOfMemorySource
from lightning_vram.memory.tracking.timeline import MemoryTimeline


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


@dataclass(frozen=True)
class Remedy:
    """A configuration that needs less, measured by a step on fake tensors."""

    code: str  # to paste into the arguments of a Trainer, or of a data loader
    needed_bytes: int
    saved_bytes: int
    time_ratio: float | None  # of a modelled step relative to this run; None: not estimated
    results: str
    fits: bool | None  # None: the available memory is unknown


@dataclass(frozen=True)
class OutOfMemory:
    """What is known of an out-of-memory error."""

    message: str
    source: OutOfMemorySource
    device: str
    request: FailedRequest
    stage: str  # as in "train, epoch 0, batch 17"
    place: Place
    by_category: Mapping[str, int] = field(default_factory=dict)  # bytes on the device
    by_module: Mapping[str, int] = field(default_factory=dict)  # bytes on the device, the largest first
    foreign_bytes: int = 0  # in tensors of this process that a step of the run does not have; 0: unknown
    growth: tuple[tuple[int, int], ...] = ()  # batches of the stage so far, and bytes in tensors at their ends
    estimated: MemoryTimeline | None = None  # a step of the run on fake tensors; None: there is none
    remedies: tuple[Remedy, ...] = ()  # the best first
    no_remedies: str = ""  # why there are none, if there are none
    cut: str = ""  # what ended the estimates of remedies early; empty: nothing
    budget_bytes: int | None = None  # that the step may use; None: unknown
