"""Garbage is collected at chosen steps alone, and as before afterwards."""

import gc
import weakref

import pytest

from lightning_vram.techniques.early_release import PacedCollection


class Knot:
    """Only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector():
    yield
    gc.enable()


def test_a_cycle_lives_until_the_next_nth_step():
    collection = PacedCollection(2, step=4)
    knot = weakref.ref(Knot())
    assert not gc.isenabled()
    for step in (4, 5, 5):
        collection.note_step(step)
        assert knot() is not None
    collection.note_step(7)  # two optimizers have stepped: the sixth is passed
    assert knot() is None
    collection.end()
    assert gc.isenabled()


def test_it_begins_with_a_collection():
    gc.disable()
    knot = weakref.ref(Knot())
    gc.enable()
    PacedCollection(100, step=0).end()
    assert knot() is None


def test_ending_and_going_on_twice_is_the_same_as_once():
    collection = PacedCollection(1, step=0)
    for method, is_automatic in ((collection.end, True), (collection.resume, False), (collection.end, True)):
        method()
        method()
        assert gc.isenabled() is is_automatic
