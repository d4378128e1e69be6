"""Why an optimizer cannot step in parts or on shards. What each one does in each form is in ``optimizer_table.txt``."""

import re
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

from lightning_vram.optimizers.moment_forms import FORMS
from lightning_vram.optimizers.step_round import refuse_optimizer, why_not_steppable


def make(kind: Any, **options: Any) -> optim.Optimizer:
    return kind([nn.Parameter(torch.zeros(2, 2))], **options)


class Renamed(optim.AdamW):
    """Has the step of its base."""


class Changed(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OtherGroups(optim.AdamW):
    def _init_group(self, *arguments: Any) -> Any:
        return super()._init_group(*arguments)


class Bare(optim.AdamW):
    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": parameters}]


def test_a_step_that_was_read_may_be_renamed_or_wrapped_by_a_scheduler_but_not_replaced():
    optimizer = make(Renamed)
    StepLR(optimizer, 1)
    assert why_not_steppable(optimizer) is None
    optimizer = make(optim.AdamW)
    optimizer.step = lambda closure=None: None
    assert why_not_steppable(optimizer) is not None
    for kind in (Changed, OtherGroups):
        message = f"^bfloat16 parameters cannot be stepped by {kind.__name__}: use one of torch.optim's"
        assert re.match(message, str(why_not_steppable(make(kind))))
        assert not any(form.fits(make(kind)) for form in FORMS.values())
    assert why_not_steppable(make(optim.AdamW, differentiable=True)) is not None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (optim.LBFGS, "it evaluates the model within a step, on one long vector of all parameters. Use another"),
        (optim.SparseAdam, "its gradients are sparse, which FSDP2 does not reduce. Use another"),
        (optim.Muon, "it looks at the rows and columns of whole matrices. Use an"),
    ],
)
def test_a_refusal_names_the_class_the_reason_and_a_way_out(kind, reason):
    class Own(kind):
        pass

    refuse_optimizer(make(Changed), is_split=True)
    with pytest.raises(ValueError, match=r"^Own cannot step on shards: ") as error:
        refuse_optimizer(make(Own), is_split=True)
    assert reason in str(error.value)
    assert "such as AdamW" in str(error.value)


def test_a_class_that_never_called_the_init_of_its_base_is_refused():
    message = (
        "Bare cannot step on shards: it never called Optimizer.__init__ and cannot have hooks. Use another optimizer, "
        "such as AdamW."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        refuse_optimizer(make(Bare), is_split=False)
