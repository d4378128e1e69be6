"""What others see of an optimizer with lean parameters: hooks, schedulers, groups, closures."""

import re
import weakref

import pytest
import torch
from support.lean_nets import EXACT, assert_same_weights, give_gradients, lean_net, make_net, take_steps
from torch import nn, optim
from torch.optim.lr_scheduler import OneCycleLR, SequentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_vram.optimizers.bf16_weights import LeanParameters


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr("lightning_vram.optimizers.bf16_weights.CHUNK_ELEMENTS", 400)


def test_hooks_run_once_and_see_the_real_parameters():
    net, _, optimizer = lean_net("bf16+split")
    seen = []

    def note(name):
        def hook(hooked, args, kwargs):
            seen.append(name)
            assert hooked is optimizer
            assert all(one is p for one, p in zip(hooked.param_groups[0]["params"], net.parameters(), strict=True))
            assert set(map(id, hooked.state)) <= set(map(id, net.parameters()))

        return hook

    handles = [
        optimizer.register_step_pre_hook(note("before")),
        optimizer.register_step_post_hook(note("after")),
        register_optimizer_step_pre_hook(note("global before")),
        register_optimizer_step_post_hook(note("global after")),
    ]
    take_steps(net, optimizer, 0)
    for handle in handles:
        handle.remove()
    assert seen == ["global before", "before", "after", "global after"]


def test_schedulers_work_as_ever_and_do_not_warn():
    # Warnings are errors here: "lr_scheduler.step() before optimizer.step()", "step() has been overridden".
    net, plain = make_net(), make_net()
    lean = LeanParameters(net.parameters(), "bf16+split")
    optimizer = optim.AdamW(net.parameters(), lr=0.1)
    reference = optim.AdamW(plain.parameters(), lr=0.1)

    def schedulers(of):
        yield SequentialLR(of, [StepLR(of, 1, 0.5), StepLR(of, 1, 0.9)], [2])
        yield OneCycleLR(of, 1.0, total_steps=9)  # which moves the betas as well

    makers = schedulers(optimizer)
    ours = [next(makers)]
    lean.attach([optimizer])
    ours += makers
    theirs = list(schedulers(reference))
    for seed in range(4):
        take_steps(net, optimizer, seed)
        take_steps(plain, reference, seed)
        for scheduler in (*ours, *theirs):
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["betas"] == reference.param_groups[0]["betas"]
    lean.restore()
    assert_same_weights(net, plain)


@pytest.mark.parametrize("scheme", EXACT)
def test_groups_islands_and_several_optimizers_step_as_in_fp32(scheme):
    net, plain = make_net(), make_net()
    lean = LeanParameters([net[0].weight, net[1].weight, net[1].bias], scheme)  # one bias stays fp32

    def optimizers(of):
        groups = [{"params": [of[0].bias, of[1].weight], "lr": 0.3}, {"params": [of[0].weight], "weight_decay": 0.5}]
        return [optim.AdamW(groups, lr=0.1), optim.SGD([of[0].weight, of[1].bias], lr=0.01)]  # one weight in both

    ours, theirs = optimizers(net), optimizers(plain)
    lean.attach(ours)
    lean.attach(ours)  # a second time does nothing
    for seed in range(3):
        for some_net, some in ((net, ours), (plain, theirs)):
            give_gradients(some_net, seed)
            for optimizer in some:
                optimizer.step()
    lean.restore()
    assert_same_weights(net, plain)


def test_parameters_without_gradients_are_passed_over():
    net, plain = make_net(), make_net()
    lean = LeanParameters(net.parameters(), "bf16+split")
    optimizer, reference = optim.AdamW(net.parameters()), optim.AdamW(plain.parameters())
    lean.attach([optimizer])
    optimizer.step()
    assert not optimizer.state
    for one, some in ((net, optimizer), (plain, reference)):
        give_gradients(one, 0)
        one[0].weight.grad = one[1].bias.grad = None
        some.step()
    assert len(optimizer.state) == 2
    lean.restore()
    assert_same_weights(net, plain)


def test_after_restoring_nothing_is_left():
    net, lean, optimizer = lean_net("bf16+kahan")
    take_steps(net, optimizer, 0)
    stand_in = optimizer.step
    lean.restore()
    assert not {"step", "load_state_dict"} & set(vars(optimizer))
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}
    give_gradients(net, 1)
    stand_in()  # whoever kept it steps the plain way
    assert all(state["step"] == 2 for state in optimizer.state.values())
    assert lean.num_steps == 1
    gone = weakref.ref(lean)
    del lean, stand_in
    assert gone() is None


def test_a_replaced_step_below_is_refused_and_one_above_still_works():
    net = make_net()
    lean = LeanParameters(net.parameters(), "bf16+split")
    optimizer = optim.SGD(net.parameters())
    optimizer.step = lambda closure=None: None
    message = (
        "bfloat16 parameters cannot be stepped by this SGD: something else steps it already, as "
        "LeanMixedPrecision(parameters=...) and torch.compile do. Leave one of the two out."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        lean.attach([optimizer])
    del optimizer.step
    lean.attach([optimizer])
    inner = optimizer.step
    optimizer.step = lambda closure=None: inner(closure)
    take_steps(net, optimizer, 0)
    lean.restore()
    take_steps(net, optimizer, 1)  # the one above stays and reaches the plain step
    assert "step" in vars(optimizer)


@pytest.mark.parametrize("scheme", EXACT)
def test_a_fused_step_of_weights_in_another_order_is_that_of_fp32(scheme):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 3, 2, 2, generator=generator).contiguous(memory_format=torch.channels_last)
    weights = [nn.Parameter(values.clone()) for _ in range(2)]
    optimizers = [optim.AdamW([weight], lr=0.1, fused=True) for weight in weights]
    lean = LeanParameters(weights[:1], scheme)
    lean.attach(optimizers[:1])
    for number in range(5):
        if number == 3:
            lean.restore()
        gradient = torch.randn(values.shape, generator=generator).bfloat16()
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.empty_like(weight).copy_(gradient)
            optimizer.step()
    assert torch.equal(*weights)


# --- of optimizers that nobody attached ---


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad])  # Adagrad has states before the first step
def test_they_step_as_in_fp32_from_the_first_step(kind, scheme):
    net, plain = make_net(), make_net()
    lean = LeanParameters(net.parameters(), scheme)
    for some in (net, plain):
        take_steps(some, kind([p for p in some.parameters() if p.dim() == 2], lr=0.01), 0, 1, 2)
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


def test_groups_can_be_added_while_training():
    net, plain, extra, plain_extra = make_net(), make_net(), nn.Linear(3, 3), nn.Linear(3, 3)
    plain_extra.load_state_dict(extra.state_dict())
    lean = LeanParameters(net.parameters(), "bf16+split")
    ours, theirs = optim.AdamW(extra.parameters()), optim.AdamW(plain_extra.parameters())
    lean.attach([ours])  # none of them lean, for now
    for optimizer, some, other in ((ours, net, extra), (theirs, plain, plain_extra)):
        take_steps(other, optimizer, 0)
        optimizer.add_param_group({"params": list(some.parameters()), "lr": 0.1})
        give_gradients(some, 1)
        take_steps(other, optimizer, 1)
    lean.restore()
    assert_same_weights(net, plain)
    assert_same_weights(extra, plain_extra)
