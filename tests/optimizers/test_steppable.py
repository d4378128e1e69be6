"""Which optimizers step on shards, which as they are, and which are refused."""

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

from lightning_vram.optimizers.step_round import STEPPABLE, refuse_optimizer, why_not_steppable

WHOLE = {optim.Adafactor, optim.Muon}


def make(kind: Any, **options: Any) -> optim.Optimizer:
    return kind([nn.Parameter(torch.zeros(2, 2))], **options)


class Renamed(optim.AdamW):
    """Has the step of its base."""


class Changed(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [*STEPPABLE, Renamed])
def test_pytorchs_elementwise_optimizers_step_locally(kind):
    optimizer = make(kind)
    assert why_not_steppable(optimizer) is None
    StepLR(optimizer, 1)  # wraps its step
    assert why_not_steppable(optimizer) is None


def test_steps_that_nobody_has_read_do_not():
    assert why_not_steppable(make(Changed)) is not None
    assert why_not_steppable(make(optim.AdamW, differentiable=True)) is not None
    assert why_not_steppable(make(optim.LBFGS)) is not None
    optimizer = make(optim.AdamW)
    optimizer.step = lambda closure=None: None
    assert why_not_steppable(optimizer) is not None


@pytest.mark.parametrize("kind", [*STEPPABLE, Changed])
def test_only_those_that_look_at_whole_matrices_are_refused_on_several_ranks(kind):
    refuse_optimizer(make(kind), is_split=False)
    if kind not in WHOLE:
        refuse_optimizer(make(kind), is_split=True)
        return
    with pytest.raises(ValueError, match="whole") as error:
        refuse_optimizer(make(kind), is_split=True)
    assert str(error.value) == (
        f"{kind.__name__} cannot step on shards: it looks at the rows and columns of whole matrices. Use an optimizer "
        "that steps each element by itself, such as AdamW, or a single device."
    )


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (optim.LBFGS, "it evaluates the model within a step, on one long vector of all parameters"),
        (optim.SparseAdam, "its gradients are sparse, which FSDP2 does not reduce"),
    ],
)
def test_those_that_never_can_are_refused(kind, reason, is_split):
    class Own(kind):
        pass

    for each in (kind, Own):
        with pytest.raises(ValueError, match=" cannot step on shards") as error:
            refuse_optimizer(make(each), is_split=is_split)
        assert str(error.value) == (
            f"{each.__name__} cannot step on shards: {reason}. Use another optimizer, such as AdamW."
        )
