"""Steps that look at values are run on real tensors, few samples at a time, and the batch follows from them."""

from typing import Any

import pytest
import torch
from support.any_modules import MODULES, WIDTH, Plain, rows
from torch import Tensor, nn

from lightning_vram.estimation import estimate_memory
from lightning_vram.estimation.traced_fit import FitRun, trace_real_fit

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SIZE = 32


class Reading(Plain):
    """Asks for a number of its data."""

    def __init__(self, ask: Any = lambda outputs: int(outputs.argmax())) -> None:
        super().__init__()
        self.ask = ask

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        outputs = self.net(batch)
        self.ask(outputs)
        return outputs.square().mean()


class Masked(Plain):
    """Keeps half of the rows, whichever they are."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch[batch[:, 0] > 0]).square().mean()


def masked_rows(size: int) -> Tensor:
    batch = rows(size)
    batch[::2, 0], batch[1::2, 0] = 1.0, -1.0
    return batch


def note_of(estimate: Any) -> str:
    (note,) = (note for note in estimate.notes if "looks at values" in note)
    return note


def test_a_number_of_the_data():
    batch = rows(SIZE)
    estimate = estimate_memory(Reading(), batch, device="cpu", find_limits=False)
    assert note_of(estimate) == (
        "The step looks at values (aten._local_scalar_dense.default): real steps were run on the CPU, with 2 and 4 "
        "samples, from which the rest follows by a linear law."
    )
    real = trace_real_fit(Reading(), batch, FitRun({}))
    assert estimate.peak_bytes == real.stage("train").peak_bytes
    assert estimate.stages["validation"].timeline.peak_bytes == real.stage("validation").peak_bytes
    assert estimate.batch_size == SIZE


def test_a_shape_that_depends_on_the_data():
    batch = masked_rows(SIZE)
    estimate = estimate_memory(Masked(), batch, device="cpu", find_limits=False)
    assert "aten.nonzero.default" in note_of(estimate)
    real = trace_real_fit(Masked(), batch, FitRun({})).stage("train").peak_bytes
    assert abs(estimate.peak_bytes - real) <= 0.02 * real


def test_on_a_card_with_the_largest_batch():
    estimate = estimate_memory(Masked(), masked_rows(SIZE), device="rtx4090")
    assert estimate.host_bytes == 0
    assert estimate.timeline.device == "lazy:0"
    assert estimate.max_batch_size > 10**6
    assert estimate.max_sequence_length is None


class Branching(Plain):
    """Does other things with other data."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        outputs = self.net(batch)
        for _ in range(int(batch.argmax()) + batch.shape[0] // 2):
            outputs = outputs + self.net(batch)
        return outputs.square().mean()


def test_steps_that_do_not_do_the_same_are_scaled():
    batch = torch.ones(SIZE, WIDTH)
    module = Branching()
    estimate = estimate_memory(module, batch, device="cpu", find_limits=False)
    assert "did not do the same" in note_of(estimate)
    runs = {size: trace_real_fit(module, batch[:size], FitRun({})).stage("train").peak_bytes for size in (2, 4)}
    assert estimate.peak_bytes >= runs[4] + (runs[4] - runs[2]) * (SIZE - 4) / 2 - 1


@pytest.mark.parametrize("ask", [lambda x: x.detach().numpy(), lambda x: x.unique()])
def test_other_things_that_fake_tensors_cannot(ask):
    assert note_of(estimate_memory(Reading(ask), rows(3), device="rtx4090", find_limits=False))


@pytest.mark.parametrize("name", ["lbfgs", "sparse"])
def test_optimizers_that_look_at_values(name):
    make, make_batch, trainer = MODULES[name]
    assert note_of(estimate_memory(make(), make_batch(8), device="rtx4090", trainer=trainer, find_limits=False))


def test_weights_without_values():
    module = Reading().to("meta")
    with pytest.raises(ValueError, match=r"_local_scalar_dense.*: give it a module whose weights are not on the meta"):
        estimate_memory(module, rows(4), device="rtx4090")


def test_a_batch_without_values_gets_some():
    batch = torch.empty(SIZE, WIDTH, device="meta")
    assert note_of(estimate_memory(Masked(), batch, device="rtx4090", find_limits=False))


def test_a_mistake_of_the_step_is_its_own():
    class Wrong(Plain):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return nn.functional.linear(batch, torch.ones(3, 5)).sum()

    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        estimate_memory(Wrong(), rows(4), device="rtx4090")
