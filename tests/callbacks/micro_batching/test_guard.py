"""A batch that a step writes into is there again for the second try."""

import pytest
import torch
from torch import nn

from lightning_vram.callbacks.micro_batching.step_state import StepState


def make_batch():
    return {"x": torch.ones(4), "more": [torch.zeros(2)]}


def make_state():
    return StepState(nn.Identity(), torch.device("cpu"))


def test_the_first_batches_are_lent_as_copies_and_later_ones_as_they_are():
    state = make_state()
    for is_copied in (True, True, False, False):
        batch = make_batch()
        state.take(batch)
        lent = state.lend(batch)
        assert (lent["x"] is not batch["x"]) == is_copied
        state.settle()


def test_a_step_that_writes_gets_copies_for_ever():
    state = make_state()
    for _ in range(4):
        batch = make_batch()
        state.take(batch)
        for _ in range(2):  # two tries
            lent = state.lend(batch)
            assert torch.equal(lent["x"], torch.ones(4))
            lent["x"].mul_(2)
            state.restore()
        state.settle()
        assert torch.equal(batch["x"], torch.ones(4))


def test_a_step_that_begins_to_write_later_cannot_be_run_again():
    state = make_state()
    for _ in range(2):
        state.take(make_batch())
        state.settle()
    batch = make_batch()
    state.take(batch)
    state.lend(batch)["more"][0].add_(1)
    with pytest.raises(RuntimeError, match="training_step modified it in place, unlike the first batches"):
        state.restore()


def test_without_a_second_try_nothing_is_copied():
    state, batch = make_state(), make_batch()
    assert state.lend(batch) is batch


class Sealed(dict):
    """A mapping that cannot be built anew."""

    def __copy__(self):
        raise TypeError("sealed")


def test_what_cannot_be_built_anew_is_lent_itself():
    state, batch = make_state(), {"x": torch.ones(4), "sealed": Sealed(y=torch.ones(2))}
    state.take(batch)
    lent = state.lend(batch)
    assert lent["x"] is not batch["x"]
    assert lent["sealed"] is batch["sealed"]
