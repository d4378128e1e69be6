"""Optimizers with lean parameters that nobody attached."""

import gc
from weakref import WeakKeyDictionary

import pytest
import torch
from support.lean_nets import EXACT, assert_same_weights, give_gradients, lean_net, make_net, take_steps
from torch import optim
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_vram.optimizers import step_round
from lightning_vram.optimizers.bf16_weights import LeanParameters
from lightning_vram.optimizers.step_round import owner_of


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


def test_one_for_each_parameter_may_step_within_the_backward():
    net, plain = make_net(), make_net()
    lean = LeanParameters(net.parameters(), "bf16+split")
    for some in (net, plain):
        optimizers = {parameter: optim.SGD([parameter], lr=0.1) for parameter in some.parameters()}
        for parameter, optimizer in optimizers.items():
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    generator = torch.Generator().manual_seed(0)
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        gradient = torch.randn(one.shape, generator=generator).bfloat16()
        (one * gradient).sum().backward()
        (other * gradient).sum().backward()
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


@pytest.fixture
def living(monkeypatch):
    """Owners of this test alone."""
    found, hooks = WeakKeyDictionary(), []
    monkeypatch.setattr(step_round, "_living", found)
    monkeypatch.setattr(step_round, "_hooks", hooks)
    yield found
    for hook in hooks:
        hook.remove()


def test_their_hook_of_all_steps_goes_with_the_last(living):
    before = len(_global_optimizer_pre_hooks)
    net, lean, optimizer = lean_net("bf16+split")
    twins = lean_net("bf16+split")[:2]
    assert (len(living), len(_global_optimizer_pre_hooks)) == (2, before + 1)
    own = optim.SGD(twins[0].parameters())
    take_steps(twins[0], own, 0)
    assert owner_of(own) is not None
    del twins, own
    gc.collect()
    assert (len(living), len(_global_optimizer_pre_hooks)) == (1, before + 1)
    lean.restore()
    assert (len(living), len(_global_optimizer_pre_hooks)) == (0, before)
    take_steps(net, optimizer, 0)
