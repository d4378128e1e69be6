"""What an estimate adds up."""

from dataclasses import replace

from support.estimates import GIB, MIB, estimate_of, timeline_of

from lightning_vram.memory.estimate.result import StageEstimate
from lightning_vram.memory.tracking.timeline import Category, Phase


def test_a_device_must_have_what_is_reserved_and_the_context():
    estimate = estimate_of()
    assert estimate.needed_bytes == 900 * MIB
    assert estimate_of(limit_bytes=900 * MIB).fits
    assert not estimate_of(limit_bytes=900 * MIB - 1).fits


def test_the_peak_is_that_of_the_training_step():
    train = estimate_of()
    smaller = StageEstimate(timeline_of([], []), 1000 * MIB, 1 * GIB, 1001 * MIB, 9 * MIB, 7, 3)
    estimate = replace(train, stages={"validation": smaller, **train.stages})
    assert estimate.peak_bytes == 760 * MIB
    assert estimate.peak_op == "aten.mm.default"
    assert estimate.by_category[Category.ACTIVATIONS] == 300 * MIB
    assert list(estimate.by_module.items()) == [("net.embed", 400 * MIB), ("net.head", 360 * MIB)]
    assert estimate.by_phase == {
        Phase.FORWARD: 610 * MIB,
        Phase.BACKWARD: 760 * MIB,
        Phase.OPTIMIZER_STEP: 450 * MIB,
    }


def test_the_process_must_have_the_most_of_all_stages():
    train = estimate_of()
    larger = StageEstimate(timeline_of([], []), 1000 * MIB, 1 * GIB, 1001 * MIB, 9 * MIB, 7, 3)
    estimate = replace(train, stages={**train.stages, "validation": larger})
    assert (estimate.allocated_bytes, estimate.reserved_bytes) == (1000 * MIB, 1 * GIB)
    assert (estimate.expandable_reserved_bytes, estimate.workspace_bytes) == (1001 * MIB, 9 * MIB)
    assert (estimate.host_bytes, estimate.pinned_bytes) == (7, 3)
    assert not estimate.fits
