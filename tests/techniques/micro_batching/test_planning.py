"""A size planned from small micro-batches, for batches of all shapes."""

from lightning_vram.core.batches.splitting import BatchFacts
from lightning_vram.techniques.micro_batching import PROBED_SIZES, SizePlanning


class Room:
    """A device with 1000 bytes of which 200 are taken; a micro-batch needs 50 and 2 per element."""

    def __init__(self) -> None:
        self.peak = 0

    def reset(self) -> None:
        self.peak = self.allocated_bytes()

    def peak_since_reset(self) -> int:
        return self.peak

    def allocated_bytes(self) -> int:
        return 200

    def room_bytes(self) -> int:
        return 800

    def run(self, num_elements: int) -> None:
        self.peak = max(self.peak, 200 + 50 + 2 * num_elements)


def test_what_fits_is_planned_in_samples_of_each_shape():
    room = Room()
    planning = SizePlanning(room)
    short = BatchFacts(num_samples=100, num_elements=1000, shape="x[100, 10]")
    long = BatchFacts(num_samples=100, num_elements=10_000, shape="x[100, 100]")
    assert planning.limit(short) is None
    for size in PROBED_SIZES:
        with planning.watching(short.elements_of(size)):
            room.run(short.elements_of(size))
    # 90 % of 800 bytes less 50, at 2 bytes an element: 335 elements.
    assert planning.limit(short) == 33
    assert planning.limit(long) == 3
    assert planning.limit(BatchFacts(num_samples=10, num_elements=100, shape="")) is None
    assert planning.limit(BatchFacts(num_samples=10, num_elements=10**6, shape="")) == 1


def test_a_small_micro_batch_that_does_not_fit_leaves_one_sample_and_any_other_error_says_nothing():
    facts = BatchFacts(num_samples=100, num_elements=1000, shape="x[100, 10]")
    planning = SizePlanning(Room())
    planning.give_up(is_too_large=True)
    assert planning.limit(facts) == 1
    planning = SizePlanning(Room())
    planning.give_up(is_too_large=False)
    assert planning.limit(facts) is None
