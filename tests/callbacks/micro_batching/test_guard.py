"""A batch that a step writes into is there again for the second try."""

import pytest
import torch
from torch import nn

from lightning_vram.callbacks.micro_batching.step_state import StepState


def make_batch():
    return {"x": torch.ones(4), "more": [torch.zeros(2)]}


def make_state():
    return StepState(nn.Identity(), torch.device("cpu"))


def test_a_batch_is_lent_as_it_is_and_as_a_copy_where_it_counts_no_writes():
    state, batch = make_state(), make_batch()
    state.take(batch)
    assert state.lend(batch) is batch
    state.settle()
    with torch.inference_mode():
        batch = make_batch()
        for _ in range(2):  # two tries
            state.take(batch)
            lent = state.lend(batch)
            assert torch.equal(lent["x"], torch.ones(4))
            lent["x"].mul_(2)
            state.restore()
    assert torch.equal(batch["x"], torch.ones(4))


def test_a_step_that_writes_into_its_batch_cannot_be_run_again():
    state, batch = make_state(), make_batch()
    state.take(batch)
    state.lend(batch)["more"][0].add_(1)
    with pytest.raises(RuntimeError) as caught:
        state.restore()
    assert str(caught.value) == (
        "MicroBatching cannot retry this batch: training_step modified it in place. Write into a copy, or give a fixed "
        "size."
    )


def test_without_a_second_try_nothing_is_copied():
    state, batch = make_state(), make_batch()
    assert state.lend(batch) is batch


class Sealed(dict):
    """A mapping that cannot be built anew."""

    def __copy__(self):
        raise TypeError("sealed")


@torch.inference_mode()
def test_what_cannot_be_built_anew_is_lent_itself():
    state, batch = make_state(), {"x": torch.ones(4), "sealed": Sealed(y=torch.ones(2))}
    state.take(batch)
    lent = state.lend(batch)
    assert lent["x"] is not batch["x"]
    assert lent["sealed"] is batch["sealed"]
