"""A timeline written by hand: what a part of it holds, and what was page-locked."""

from lightning_vram.memory.tracking.timeline import Allocation, Category, MemoryEvent, MemoryTimeline, Phase


def allocation(op: str, category: Category, *, device: str = "cpu", is_pinned: bool = False) -> Allocation:
    return Allocation(op, "", Phase.FORWARD, category, device, is_pinned=is_pinned)


WEIGHT, KEPT, GRADIENT, PINNED = range(4)
TIMELINE = MemoryTimeline(
    allocations=(
        allocation("held", Category.PARAMETERS),
        allocation("aten.relu.default", Category.ACTIVATIONS),
        allocation("aten.mm.default", Category.GRADIENTS),
        allocation("aten.empty.default", Category.TEMPORARIES, is_pinned=True),
    ),
    events=(
        MemoryEvent(WEIGHT, 100, Phase.FORWARD),
        MemoryEvent(KEPT, 30, Phase.FORWARD),
        MemoryEvent(PINNED, 8, Phase.FORWARD),
        MemoryEvent(GRADIENT, 50, Phase.BACKWARD),
        MemoryEvent(KEPT, -30, Phase.BACKWARD),
        MemoryEvent(PINNED, 12, Phase.BACKWARD),
        MemoryEvent(PINNED, -20, Phase.OPTIMIZER_STEP),
    ),
    backward_starts=(3,),
    device="cpu",
)


def test_a_part_begins_with_what_is_alive_and_has_the_rest_of_the_events():
    part = TIMELINE.between(4, 6)
    assert part.events == (
        MemoryEvent(WEIGHT, 100, Phase.BACKWARD),
        MemoryEvent(KEPT, 30, Phase.BACKWARD),
        MemoryEvent(GRADIENT, 50, Phase.BACKWARD),
        MemoryEvent(PINNED, 8, Phase.BACKWARD),
        *TIMELINE.events[4:6],
    )
    assert part.live_bytes == 100 + 50 + 20
    assert part.backward_starts == ()


def test_parts_keep_the_starts_of_backwards_that_lie_in_them():
    part = TIMELINE.between(1, 7)
    assert part.backward_starts == (3,)  # one birth in the place of one event
    assert part.saved_for_backward_bytes == 30
    assert TIMELINE.between(3, 7).backward_starts == (3,)  # three births, and then the backward
    assert TIMELINE.between(0, 7) == TIMELINE
    assert {TIMELINE.between(start, 7).live_bytes for start in range(8)} == {TIMELINE.live_bytes}


def test_most_pinned_bytes_at_once():
    assert TIMELINE.pinned_peak_bytes == 20
    assert TIMELINE.between(0, 5).pinned_peak_bytes == 8
