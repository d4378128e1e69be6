"""What is known of memory that ran out."""

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
    """Where memory ran out.

    Args:
        work: What was being done.
        module: Innermost module of the model that was running; empty if none was.
        line: Of the user's code, as ``file:line: text``; empty if none is known.
        function: Innermost Python function.
    """

    work: Work
    module: str = ""
    line: str = ""
    function: str = ""


@dataclass(frozen=True)
class Remedy:
    """A way to train or evaluate that needs less, measured by a step on tensors without memory.

    Args:
        code: To paste into the arguments of a Trainer, or of a data loader.
        needed_bytes: Of the device.
        saved_bytes: Of what the run needs as it is.
        time_ratio: Seconds of a step, of those as it is, by a model of time; ``None``: that was not looked at.
        results: How they compare with those of the run as it is.
        fits: Whether it needs no more than there is; ``None``: nobody knows what there is.
    """

    code: str
    needed_bytes: int
    saved_bytes: int
    time_ratio: float | None
    results: str
    fits: bool | None


@dataclass(frozen=True)
class OutOfMemory:
    """Memory that ran out.

    Args:
        message: Of the error.
        source: Who ran out.
        device: That the run is on.
        request: What was asked for, and what there was.
        stage: As in ``"train, epoch 0, batch 17"``.
        place: Where it was.
        by_category: Bytes on the device by what they are for.
        by_module: Bytes on the device by module, the largest first.
        foreign_bytes: In tensors of this process that a step of the run does not have; 0 where nobody knows.
        growth: Batches of the stage so far, and bytes in tensors at their ends, of the last batches.
        estimated: A step of the run on tensors without memory; ``None`` if there is none.
        remedies: From the best to the last.
        no_remedies: Why there are none, if there are none.
        cut: What ended the estimates of remedies early; empty if nothing did.
        budget_bytes: That the step may use; ``None``: unknown, 1: none.
    """

    message: str
    source: OutOfMemorySource
    device: str
    request: FailedRequest
    stage: str
    place: Place
    by_category: Mapping[str, int] = field(default_factory=dict)
    by_module: Mapping[str, int] = field(default_factory=dict)
    foreign_bytes: int = 0
    growth: tuple[tuple[int, int], ...] = ()
    estimated: MemoryTimeline | None = None
    remedies: tuple[Remedy, ...] = ()
    no_remedies: str = ""
    cut: str = ""
    budget_bytes: int | None = None
