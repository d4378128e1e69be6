"""A batch that a step writes into is there again for the second try."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_vram.core.batches.micro_batches import BatchGuard


def make_batch():
    return {"x": torch.ones(4), "more": [torch.zeros(2)], "packed": pack_sequence([torch.ones(2), torch.ones(1)])}


def test_the_first_batches_are_lent_as_copies_and_later_ones_as_they_are():
    guard = BatchGuard()
    for is_copied in (True, True, False, False):
        batch = make_batch()
        guard.watch(batch)
        lent = guard.lend(batch)
        assert (lent["x"] is not batch["x"]) == is_copied
        assert torch.equal(lent["packed"].data, batch["packed"].data)
        guard.settle()


def test_a_step_that_writes_gets_copies_for_ever():
    guard = BatchGuard()
    for _ in range(4):
        batch = make_batch()
        guard.watch(batch)
        for _ in range(2):  # two tries
            lent = guard.lend(batch)
            assert torch.equal(lent["x"], torch.ones(4))
            lent["x"].mul_(2)
            lent["packed"].data.zero_()
            guard.check()
        guard.settle()
        assert torch.equal(batch["x"], torch.ones(4))


def test_a_step_that_begins_to_write_later_cannot_be_run_again():
    guard = BatchGuard()
    for _ in range(2):
        guard.watch(make_batch())
        guard.settle()
    batch = make_batch()
    guard.watch(batch)
    guard.lend(batch)["more"][0].add_(1)
    with pytest.raises(RuntimeError, match="training_step modified it in place, unlike the first batches"):
        guard.check()


def test_without_a_second_try_nothing_is_copied():
    guard, batch = BatchGuard(), make_batch()
    assert guard.lend(batch) is batch


class Sealed(dict):
    """A mapping that cannot be built anew."""

    def __copy__(self):
        raise TypeError("sealed")


def test_what_cannot_be_built_anew_is_lent_itself():
    guard, batch = BatchGuard(), {"x": torch.ones(4), "sealed": Sealed(y=torch.ones(2))}
    guard.watch(batch)
    lent = guard.lend(batch)
    assert lent["x"] is not batch["x"]
    assert lent["sealed"] is batch["sealed"]
