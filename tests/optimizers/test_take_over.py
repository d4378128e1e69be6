"""Optimizers with lean parameters that nobody attached."""

import pytest
import torch
from support.lean_nets import EXACT, assert_same_weights, give_gradients, make_net, take_steps
from torch import optim

from lightning_vram.optimizers.bf16_weights import LeanParameters


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad])  # Adagrad has states before the first step
def test_they_step_as_in_fp32_from_the_first_step(kind, scheme):
    net, plain = make_net(), make_net()
    lean = LeanParameters(net.parameters(), scheme)
    ours, theirs = ([p for p in some.parameters() if p.dim() == 2] for some in (net, plain))
    optimizer, reference = kind(ours, lr=0.01), kind(theirs, lr=0.01)
    for seed in range(3):
        take_steps(net, optimizer, seed)
        take_steps(plain, reference, seed)
    lean.restore()
    assert_same_weights(net, plain)


@pytest.mark.parametrize("kind", [optim.LBFGS, optim.SparseAdam])
def test_one_that_cannot_is_refused_and_steps_nothing(kind):
    net = make_net()
    lean = LeanParameters(net.parameters(), "bf16+split")
    optimizer = kind(list(net.parameters()))
    before = lean.full_state(net.state_dict())
    give_gradients(net, 0)
    with pytest.raises(ValueError, match=f"^bfloat16 parameters cannot be stepped by {kind.__name__}: use one of"):
        optimizer.step(lambda: 0.0)
    after = lean.full_state(net.state_dict())
    assert all(torch.equal(before[name], after[name]) for name in before)
    lean.restore()
    take_steps(net, optim.SGD(net.parameters()), 1)
