"""What an optimizer keeps is found before it steps, and nothing of it changes."""

import copy

import pytest
import torch
from torch import nn, optim

from lightning_vram.optimizers.moment_forms import StateLayout, find_layout

FLOAT = torch.float32
CASES = [
    (optim.AdamW, {}, ["exp_avg", "exp_avg_sq"], ["step"]),
    (optim.AdamW, {"fused": True}, ["exp_avg", "exp_avg_sq"], ["step"]),
    (optim.Adam, {"amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"], ["step"]),
    (optim.SGD, {}, [], []),
    (optim.SGD, {"momentum": 0.9}, ["momentum_buffer"], []),
    (optim.Adagrad, {}, ["sum"], ["step"]),
    (optim.RMSprop, {"centered": True, "momentum": 0.1}, ["square_avg", "momentum_buffer", "grad_avg"], ["step"]),
    (optim.NAdam, {}, ["exp_avg", "exp_avg_sq"], ["step", "mu_product"]),
    (optim.ASGD, {}, ["ax"], ["step", "eta", "mu"]),
    (optim.Rprop, {}, ["prev", "step_size"], ["step"]),
]


@pytest.mark.parametrize(("kind", "options", "elementwise", "others"), CASES)
def test_names_and_dtypes_are_those_of_a_real_step(kind, options, elementwise, others) -> None:
    parameter = nn.Parameter(torch.randn(7))
    optimizer = kind([parameter], lr=0.1, **options)
    layout = find_layout(optimizer, optimizer.param_groups[0], FLOAT)
    assert sorted(layout.elementwise) == sorted((key, FLOAT) for key in elementwise)
    assert sum(layout.stored_bytes(1)) == 4 * len(elementwise)
    parameter.grad = torch.randn(7)
    optimizer.step()
    assert optimizer.state.get(parameter, {}).keys() == {*elementwise, *others}


def test_states_have_the_precision_of_the_parameter() -> None:
    optimizer = optim.AdamW([nn.Parameter(torch.zeros(3))])
    layout = find_layout(optimizer, optimizer.param_groups[0], torch.bfloat16)
    assert layout == StateLayout((("exp_avg", torch.bfloat16), ("exp_avg_sq", torch.bfloat16)))


def test_the_group_decides() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(3))], "momentum": momentum} for momentum in (0.0, 0.5)]
    optimizer = optim.SGD(groups, lr=0.1)
    names = [[key for key, _ in find_layout(optimizer, group, FLOAT).elementwise] for group in optimizer.param_groups]
    assert names == [[], ["momentum_buffer"]]


def test_nothing_of_the_optimizer_changes_and_no_hook_runs() -> None:
    parameter = nn.Parameter(torch.randn(5))
    optimizer = optim.NAdam([parameter], lr=torch.tensor(0.1), capturable=False)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook ran"))
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook ran"))
    before, values = vars(optimizer).copy(), copy.deepcopy(optimizer.state_dict())
    random, weights = torch.get_rng_state(), parameter.detach().clone()
    find_layout(optimizer, optimizer.param_groups[0], FLOAT)
    assert vars(optimizer) == before
    assert optimizer.state_dict() == values
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == [parameter]
    assert parameter.grad is None
    assert torch.equal(parameter, weights)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("kind", [optim.Muon, optim.Adafactor, optim.LBFGS])
def test_others_are_refused(kind) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(3, 3))])
    with pytest.raises(ValueError, match="nvme_path cannot hold") as error:
        find_layout(optimizer, optimizer.param_groups[0], FLOAT)
    assert str(error.value) == (
        f"nvme_path cannot hold the optimizer state of {kind.__name__}: its step is not known to treat each weight by "
        "itself; use one of torch.optim's Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, "
        "SGD, or leave nvme_path out."
    )
