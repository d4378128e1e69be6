"""Events as the allocator of a card sees them."""

from support.estimates import allocation, timeline_of

from lightning_vram.memory.estimate.event_order import as_on_card
from lightning_vram.memory.tracking.timeline import Category, Phase

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def orders(ops, changes, module=""):
    made = [allocation(op, module, Category.TEMPORARIES) for op in ops]
    return [event.allocation for event in as_on_card(timeline_of(made, changes)).events]


def test_dropout_makes_its_mask_first():
    ops = ["aten.native_dropout.default"] * 2
    assert orders(ops, [(0, 4, FORWARD), (1, 1, FORWARD)]) == [1, 0]


def test_gradients_are_summed_in_place_by_autograd_and_by_nobody_else():
    ops = ["aten.mm.default", "aten.add.Tensor"]
    changes = [(0, 4, BACKWARD), (1, 4, BACKWARD), (0, -4, BACKWARD)]
    assert orders(ops, changes) == [0, 0, 1]
    assert orders(ops, changes, module="net.layer") == [0, 1, 0]  # recomputation
    assert orders(ops, [(0, 4, FORWARD), (1, 4, FORWARD), (0, -4, FORWARD)]) == [0, 1, 0]
    assert orders(ops, [(0, 8, BACKWARD), (1, 4, BACKWARD), (0, -8, BACKWARD)]) == [0, 1, 0]
