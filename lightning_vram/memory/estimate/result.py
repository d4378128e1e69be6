"""What an estimate says: numbers only, frozen. Tables and pictures are made of them elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.tracking.timeline import Category, MemoryTimeline, Phase

TRAIN = "train"


@dataclass(frozen=True)
class StageEstimate:
    """One batch of training (with its optimizer step) or of validation, on one rank.

    Args:
        timeline: Every change of live bytes; its sums are over the estimated device.
        allocated_bytes: Peak of ``max_memory_allocated``: live bytes rounded as the allocator does, and workspaces.
        reserved_bytes: Peak of ``max_memory_reserved``: what the allocator takes from the driver.
        expandable_reserved_bytes: The same with ``expandable_segments:True``.
        workspace_bytes: Of these, what libraries (cuBLAS, cuDNN) take beside tensors.
        host_bytes: Most bytes in host tensors at once; 0 if the device is the host.
        pinned_bytes: Of these, page-locked.
        first_event: Index of the timeline's first event of the stage itself; those before are what was there already.
    """

    timeline: MemoryTimeline = field(repr=False)  # thousands of events
    allocated_bytes: int
    reserved_bytes: int
    expandable_reserved_bytes: int
    workspace_bytes: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0
    first_event: int = 0


def _most(name: str) -> int:  # for type checkers: a property
    return property(lambda estimate: max(getattr(one, name) for one in estimate.stages.values()))  # type: ignore[return-value]


@dataclass(frozen=True)
class MemoryEstimate:
    """Whether a run fits a device, and what uses its memory: bytes of one rank.

    What the process must have in all (:attr:`allocated_bytes`,
    :attr:`reserved_bytes`, :attr:`needed_bytes`, :attr:`host_bytes`, :attr:`pinned_bytes`) is the most over all stages.

    Args:
        device: What it is held against.
        stages: ``"train"``, ``"validation"``: at least one. What is said of the peak is
            said of training, else of the first.
        batch_size: Samples of the estimated batch on each rank.
        max_batch_size: Largest that fits; ``None`` if it is not known, 0 if none does.
        batch_size_refusal: What the model raises with one sample more, in one line; empty if memory is the limit.
        max_sequence_length: Longest that fits at this batch size; ``None`` if it is not known, or there is none.
        sequence_length_refusal: What the model raises with one token more, in one line; empty if memory is the limit.
        world_size: Number of ranks.
        context_bytes: What the driver takes for the process before the first tensor.
        notes: What a reader must know, a sentence each.
    """

    device: DeviceSpec
    stages: Mapping[str, StageEstimate]
    batch_size: int
    max_batch_size: int | None = None
    batch_size_refusal: str = ""
    max_sequence_length: int | None = None
    sequence_length_refusal: str = ""
    world_size: int = 1
    context_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the device has :attr:`needed_bytes`."""
        return self.needed_bytes <= self.device.memory_bytes

    @property
    def needed_bytes(self) -> int:
        """What the process takes of the device: reserved bytes and context."""
        return self.reserved_bytes + self.context_bytes

    @property
    def main_stage(self) -> StageEstimate:
        """That of a training step, else the first."""
        return self.stages.get(TRAIN) or next(iter(self.stages.values()))

    @property
    def timeline(self) -> MemoryTimeline:
        """Live bytes over a training step."""
        return self.main_stage.timeline

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors alive at once, as ``track_memory`` counts them."""
        return self.timeline.peak_bytes

    @property
    def peak_op(self) -> str:
        """Operator whose result made the peak."""
        return self.timeline.peak_op

    @property
    def by_category(self) -> Mapping[Category, int]:
        """Bytes of each category at the peak; they add up to :attr:`peak_bytes`."""
        return self.timeline.peak_by_category

    @property
    def by_module(self) -> Mapping[str, int]:
        """Bytes of each module at the peak, largest first; they add up to :attr:`peak_bytes`."""
        return self.timeline.peak_by_module

    @property
    def by_phase(self) -> Mapping[Phase, int]:
        """Most bytes alive at once during each phase."""
        return self.timeline.peak_by_phase

    allocated_bytes = _most("allocated_bytes")
    """Most bytes that the allocator hands out at once."""

    reserved_bytes = _most("reserved_bytes")
    """Most bytes that the allocator takes from the driver."""

    expandable_reserved_bytes = _most("expandable_reserved_bytes")
    """The same with ``expandable_segments:True``."""

    workspace_bytes = _most("workspace_bytes")
    """Most bytes that libraries take beside tensors."""

    host_bytes = _most("host_bytes")
    """Most bytes in host tensors at once."""

    pinned_bytes = _most("pinned_bytes")
    """Most bytes in page-locked host tensors at once."""
