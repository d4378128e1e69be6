"""What cannot be lean, and what must be."""

import re

import pytest
import torch
from support.lean_nets import make_net
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

from lightning_vram.optimizers.bf16_weights import LeanParameters, refuse_lost_updates
from lightning_vram.optimizers.step_round import owner_of


class Foreign(optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class Named(optim.AdamW):
    """The same step under another name."""


def refusal(message: str):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def test_an_unknown_scheme_is_refused():
    schemes = "'bf16+master', 'bf16+split', 'bf16+kahan' or 'bf16+stochastic'"
    with refusal(f"LeanParameters(scheme) must be {schemes}, got 'half'."):
        LeanParameters([], "half")


@pytest.mark.parametrize(
    "make",
    [
        lambda mesh: nn.Parameter(torch.ones(3, 2, dtype=torch.float64)),
        lambda mesh: nn.LazyLinear(3).weight,
        lambda mesh: nn.Linear(2, 2, device="meta").weight,
        lambda mesh: fully_shard(nn.Linear(2, 2), mesh=mesh).weight,
    ],
    ids=["64 bit", "lazy", "meta", "sharded"],
)
def test_a_parameter_of_another_kind_is_refused_and_no_other_is_converted(make, mesh):
    first, parameter = nn.Parameter(torch.ones(2)), make(mesh)
    message = (
        f"A {parameter.dtype} parameter of type {type(parameter).__name__} on {parameter.device} cannot be stored in "
        "bfloat16: only plain tensors of float32, float16 or bfloat16 can. Initialize lazy and meta parameters first, "
        "and leave quantized ones out. With FSDP2 give fully_shard(mp_policy=MixedPrecisionPolicy("
        "param_dtype=torch.bfloat16)) instead."
    )
    with refusal(message):
        LeanParameters([first, parameter], "bf16+split")
    assert first.dtype is torch.float32


def test_parameters_that_are_not_floating_are_passed_over():
    counts = nn.Parameter(torch.arange(3), requires_grad=False)
    LeanParameters([counts], "bf16+master")
    assert counts.dtype is torch.int64


@pytest.mark.parametrize("kind", [optim.LBFGS, optim.SparseAdam, Foreign])
def test_other_optimizers_are_refused_before_any_is_changed(kind):
    net = make_net()
    lean = LeanParameters(net.parameters(), "bf16+split")
    optimizers = [optim.AdamW(net[0].parameters()), kind(list(net.parameters()))]
    message = (
        f"bfloat16 parameters cannot be stepped by {kind.__name__}: use one of torch.optim's Adadelta, Adafactor, "
        "Adagrad, Adam, AdamW, Adamax, ASGD, Muon, NAdam, RAdam, RMSprop, Rprop, SGD, a subclass with the same step, "
        'or parameters="fp32".'
    )
    with refusal(message):
        lean.attach(optimizers)
    assert owner_of(optimizers[0]) is None


def test_a_differentiable_step_is_refused():
    net = make_net()
    lean = LeanParameters(net.parameters(), "bf16+split")
    with refusal("bfloat16 parameters cannot be stepped by SGD(differentiable=True): leave that off."):
        lean.attach([optim.SGD(net.parameters(), differentiable=True)])


@pytest.mark.parametrize("kind", [optim.AdamW, Named, optim.LBFGS])
def test_plain_sixteen_bit_weights_are_refused(kind):
    net = make_net()
    net[0].bfloat16()
    net[1].half()
    net[0].bias.requires_grad_(False)
    message = (
        f"{kind.__name__} would train 3 parameters that are torch.bfloat16 and torch.float16, and lose every update "
        "below half a unit in the last place (in a test the loss ended at .105 instead of .0266). Use "
        'LeanMixedPrecision("bf16", parameters="bf16+split"), one of its other schemes, or fp32 weights.'
    )
    with refusal(message):
        refuse_lost_updates([optim.SGD([nn.Parameter(torch.ones(1))]), kind(net.parameters())])


def test_frozen_weights_and_other_optimizers_pass():
    net = make_net().bfloat16()
    refuse_lost_updates([Foreign(net.parameters()), optim.AdamW(make_net().parameters())])
    refuse_lost_updates([optim.AdamW(net.requires_grad_(requires_grad=False).parameters())])
