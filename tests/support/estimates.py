"""Timelines and estimates made by hand, small enough to be worked out."""

from collections.abc import Sequence

from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.result import MemoryEstimate, StageEstimate
from lightning_vram.memory.tracking.timeline import Allocation, Category, MemoryEvent, MemoryTimeline, Phase

MIB = 2**20
GIB = 2**30
DEVICE = "lazy:0"


def allocation(op: str, module: str, category: Category, phase: Phase = Phase.FORWARD, device=DEVICE) -> Allocation:
    return Allocation(op, module, phase, category, device)


def timeline_of(allocations: Sequence[Allocation], changes: Sequence[tuple[int, int, Phase]]) -> MemoryTimeline:
    """Changes are (allocation, MiB, phase)."""
    events = tuple(MemoryEvent(number, size * MIB, phase) for number, size, phase in changes)
    return MemoryTimeline(tuple(allocations), events, (), DEVICE)


def training_timeline() -> MemoryTimeline:
    """Held: 100 and 200 MiB. The peak of 760 MiB is the third change of the backward; 300 are there at the end."""
    forward, backward, step = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP
    return timeline_of(
        (
            allocation("held", "net.embed", Category.PARAMETERS),
            allocation("held", "net.embed", Category.OPTIMIZER_STATE),
            allocation("aten.addmm.default", "net.head", Category.ACTIVATIONS),
            allocation("aten.cross_entropy.default", "", Category.ACTIVATIONS),
            allocation("aten.mm.default", "net.head", Category.TEMPORARIES, backward),
            allocation("aten.mm.default", "net.embed", Category.GRADIENTS, backward),
            allocation("aten.sqrt.default", "", Category.TEMPORARIES, step),
            allocation("aten.ones.default", "", Category.TEMPORARIES, device="cpu"),
        ),
        (
            *((0, 100, forward), (1, 200, forward)),
            *((7, 5000, forward), (2, 300, forward), (3, 10, forward)),
            *((3, -10, backward), (4, 60, backward), (5, 100, backward), (2, -300, backward), (4, -60, backward)),
            *((6, 50, step), (6, -50, step)),
            (5, -100, forward),
        ),
    )


def estimate_of(
    timeline: MemoryTimeline | None = None, *, limit_bytes: int = GIB, kind=MemoryEstimate, **changes
) -> MemoryEstimate:
    stage = StageEstimate(
        timeline or training_timeline(),
        allocated_bytes=780 * MIB,
        reserved_bytes=800 * MIB,
        expandable_reserved_bytes=790 * MIB,
        workspace_bytes=8 * MIB,
    )
    arguments = {"stages": {"train": stage}, "batch_size": 8, "context_bytes": 100 * MIB} | changes
    return kind(DeviceSpec("RTX 4090", limit_bytes), **arguments)
