"""What ``MomentsInBF16`` and ``LowBitOptimizer`` refuse alike, which optimizers they take in, and what they leave."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import ForkingOffload
from support.host_layers import ADAMW, Layers
from support.offload_nets import leave_group
from torch import Tensor, nn
from torch.optim import SGD, RMSprop

from lightning_vram import LowBitOptimizer, MomentsInBF16
from lightning_vram.core.tensors.codecs import LowBitTensor
from lightning_vram.optimizers.step_round import owner_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
IN_4_BITS = partial(LowBitOptimizer, bits=4)
ABLE = "Adam, AdamW, Adamax, NAdam, RAdam"
PARTS = [(MomentsInBF16, "MomentsInBF16"), (IN_4_BITS, "LowBitOptimizer(bits=4)")]  # and what users call it
both = pytest.mark.parametrize(("make", "name"), PARTS, ids=["bf16", "4 bit"])


def assert_refused(trainer: Any, model: Any, message: str, error: Any = MisconfigurationException) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        trainer.fit(model)
    leave_group()


@both
@pytest.mark.parametrize("optimizer", [RMSprop, partial(SGD, lr=0.1)], ids=["RMSprop", "SGD"])
def test_what_has_no_such_moments_is_refused(optimizer, make, name, make_trainer):
    kind = getattr(optimizer, "func", optimizer).__name__
    able = ABLE if make is MomentsInBF16 else f"{ABLE}, SGD with momentum and Lion"
    way_out = f"use one of these, as torch.optim has it, or leave {name} out."
    message = f"{name} is for the moments of {able}, got {kind}: {way_out}"
    assert_refused(make_trainer(callbacks=[make()]), Layers(optimizer, num_batches=1), message)


@both
@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("strategy", ["auto", "fsdp_offload"])
def test_weights_of_16_bit_are_refused(strategy, make, name, make_trainer):
    trainer = make_trainer(callbacks=[make()], precision="bf16-true", strategy=strategy, devices=1)
    message = (
        f"{name} is for the moments of float32 weights, got torch.bfloat16 in AdamW: use precision='bf16-mixed' or "
        f"'32-true', or leave {name} out."
    )
    assert_refused(trainer, Layers(num_batches=1), message, ValueError)


@both
def test_another_form_on_the_host_is_refused_beside_it(make, name, make_trainer):
    host_state, words = ("8bit", "8 bit") if make is MomentsInBF16 else ("bf16", "bfloat16")
    strategy = ForkingOffload(host_state=host_state)
    theirs = f"FSDPOffloadStrategy(host_state={host_state!r})"
    message = f"{name} does not work with {theirs}, which has moments in {words}: leave one out."
    trainer = make_trainer(callbacks=[make()], strategy=strategy)
    assert_refused(trainer, Layers(num_batches=1), message)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (MomentsInBF16, MomentsInBF16, "Two MomentsInBF16"),
        (LowBitOptimizer, IN_4_BITS, "Two LowBitOptimizer"),
        (LowBitOptimizer, MomentsInBF16, "LowBitOptimizer and MomentsInBF16"),
    ],
    ids=["bf16", "bits", "both"],
)
def test_two_are_refused(first, second, named, make_trainer):
    trainer = make_trainer(callbacks=[first(), second()])
    assert_refused(trainer, Layers(num_batches=1), f"{named} in one Trainer: leave one out.")


class Late(Layers):
    """Makes another optimizer in the midst of training, and one of something else."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.late, self.other = ADAMW(self.parameters()), ADAMW([nn.Parameter(torch.ones(5000))])
            self.other.param_groups[0]["params"][0].grad = torch.ones(5000)
            self.late.step()
            self.other.step()


@both
def test_late_optimizers_are_taken_in_and_those_of_others_are_not(make, name, make_trainer):
    model = Late(num_batches=4)
    make_trainer(callbacks=[make()], max_epochs=1).fit(model)
    narrow = [state["exp_avg"] for state in model.late.state.values() if state["exp_avg"].numel() >= 4096]
    assert len(narrow) == 2
    assert all(one.dtype == torch.bfloat16 or isinstance(one, LowBitTensor) for one in narrow)
    assert {type(state["exp_avg"]) for state in model.other.state.values()} == {torch.Tensor}
    assert {state["exp_avg"].dtype for state in model.other.state.values()} == {torch.float32}


class Mixed(Layers):
    """Has a few numbers of other kinds."""

    def __init__(self) -> None:
        super().__init__(ADAMW, num_batches=4)
        self.scale = nn.Parameter(torch.ones(80, dtype=torch.float64))
        self.phase = nn.Parameter(torch.ones(80, dtype=torch.complex64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        others = self.scale.square().mean() + self.phase.abs().square().mean()
        return super().training_step(batch, batch_idx) + others.float()


@both
@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("strategy", ["auto", "fsdp_offload"])
def test_parameters_without_such_moments_train_as_they_would_and_are_named(strategy, make, name, make_trainer, caplog):
    ran = []
    for parts in ([], [make()]):
        torch.manual_seed(0)
        model = Mixed()
        with caplog.at_level("INFO"):
            make_trainer(callbacks=parts, max_epochs=1, strategy=strategy, devices=1).fit(model)
        ran.append(model)
        leave_group()
    plain, ours = ran
    assert not torch.equal(plain.net[2].weight, ours.net[2].weight)
    for key in ("scale", "phase"):
        assert torch.equal(plain.get_parameter(key), ours.get_parameter(key))
        assert not torch.equal(ours.get_parameter(key), torch.ones(80).to(ours.get_parameter(key)))
    kinds = "scale (torch.float64), phase (torch.complex64)"
    named = name if strategy == "auto" else f"fsdp_offload (moments in {'bf16' if make is MomentsInBF16 else '4bit'})"
    message = f"{named} does not change the moments of parameters that are not dense float32: {kinds}."
    assert caplog.messages.count(message) == 1


@both
def test_it_is_undone_after_the_fit(make, name, fit):
    model = fit(partial(Layers, num_batches=3), make())
    (optimizer,) = model.trainer.optimizers
    before = [(state["exp_avg"] + 0).float() for state in optimizer.state.values()]
    assert owner_of(optimizer) is None
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for state, moment in zip(optimizer.state.values(), before, strict=True):
        assert {type(value) for value in state.values()} == {Tensor}
        assert state["exp_avg"].dtype == torch.float32
        assert torch.equal(state["exp_avg"], moment / 2)
    assert not optimizer._optimizer_step_pre_hooks
