"""The numbers of an estimate, frozen. Tables and pictures are made from them elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.tracking.timeline import Category, MemoryTimeline, Phase

TRAIN = "train"


@dataclass(frozen=True)
class StageEstimate:
    """Memory of one training batch (with its optimizer step) or one validation batch, on one rank.

    Args:
        timeline: Every change of live bytes on the estimated device.
        allocated_bytes: Peak of ``max_memory_allocated``: live bytes, rounded as the allocator does, and workspaces.
        reserved_bytes: Peak of ``max_memory_reserved``: bytes that the allocator requests from the driver.
        expandable_reserved_bytes: Peak of reserved bytes with ``expandable_segments:True``.
        workspace_bytes: Workspaces of libraries (cuBLAS, cuDNN), included in the allocated bytes.
        host_bytes: Peak bytes of host tensors; 0 if the device is the host.
        pinned_bytes: Peak bytes of pinned host tensors, included in ``host_bytes``.
        first_event: Index of the first timeline event of the stage; earlier events are tensors that existed before.
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

    :attr:`allocated_bytes`, :attr:`reserved_bytes`, :attr:`needed_bytes`, :attr:`host_bytes` and :attr:`pinned_bytes`
    are maxima over all stages.

    Args:
        device: Device that the estimate is compared with.
        stages: Estimates by stage, at least one of ``"train"`` and ``"validation"``. Properties of the peak describe
            the training step if there is one.
        batch_size: Samples of the estimated batch on each rank; 0 if unknown.
        max_batch_size: Largest batch size that fits; ``None`` if unknown, 0 if no batch fits.
        batch_size_refusal: Error of the model with a larger batch, in one line; empty if memory is the limit.
        max_sequence_length: Longest sequence that fits at this batch size; ``None`` if unknown or not applicable.
        sequence_length_refusal: Error of the model with a longer sequence, in one line; empty if memory is the limit.
        world_size: Number of ranks.
        context_bytes: Memory that the driver needs for the process (CUDA context).
        notes: Limits of this estimate, one sentence each.
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
        """Device memory that the process needs: reserved bytes plus CUDA context."""
        return self.reserved_bytes + self.context_bytes

    @property
    def main_stage(self) -> StageEstimate:
        """The estimate of a training step if there is one, otherwise of the first stage."""
        return self.stages.get(TRAIN) or next(iter(self.stages.values()))

    @property
    def timeline(self) -> MemoryTimeline:
        """Live bytes over a training step."""
        return self.main_stage.timeline

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of live tensors, as ``track_memory`` counts them."""
        return self.timeline.peak_bytes

    @property
    def peak_op(self) -> str:
        """Operator whose result caused the peak."""
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
        """Peak bytes of live tensors during each phase."""
        return self.timeline.peak_by_phase

    allocated_bytes = _most("allocated_bytes")
    """Peak bytes that the allocator has allocated."""

    reserved_bytes = _most("reserved_bytes")
    """Peak bytes that the allocator has reserved from the driver."""

    expandable_reserved_bytes = _most("expandable_reserved_bytes")
    """Peak reserved bytes with ``expandable_segments:True``."""

    workspace_bytes = _most("workspace_bytes")
    """Peak bytes of library workspaces."""

    host_bytes = _most("host_bytes")
    """Peak bytes of host tensors."""

    pinned_bytes = _most("pinned_bytes")
    """Peak bytes of pinned host tensors."""
