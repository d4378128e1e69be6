"""One step in portions: each parameter once, with the settings it began with, states where the optimizer has them."""

from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_vram.optimizers.step_round import StepRound
from lightning_vram.private_names.fsdp2 import local_shard

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


def make_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(4)]
    for parameter in parameters[:3]:
        parameter.grad = torch.randn(4, 3, generator=generator)
    return parameters


def groups_of(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.01, "weight_decay": 0.5}]


def assert_equal(one: list[nn.Parameter], other: list[nn.Parameter]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert torch.equal(local_shard(ours), theirs)


@pytest.mark.parametrize("options", [{"fused": True}, {}, {"foreach": True}])
def test_portions_make_the_step_of_the_whole(options):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = optim.AdamW(groups_of(ours), **options)
    reference = optim.AdamW(groups_of(theirs), **options)
    for _ in range(3):
        step_round = StepRound(optimizer, is_on_host=False)
        for portion in ([ours[2]], [ours[0], ours[3]]):
            step_round.run(step_round.take(portion))
        step_round.run(step_round.take_rest())
        reference.step()
    assert_equal(ours, theirs)
    assert optimizer.state.keys() == set(ours[:3])
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        assert optimizer.state[one].keys() == reference.state[other].keys()
        assert all(torch.equal(value, reference.state[other][key]) for key, value in optimizer.state[one].items())


def test_each_parameter_is_taken_once_and_only_with_a_gradient():
    parameters = make_parameters()
    step_round = StepRound(optim.SGD(parameters, lr=0.1), is_on_host=True)
    assert [member.parameter for member in step_round.take(parameters[1:])] == parameters[1:3]
    assert step_round.take(parameters[1:3]) == []
    assert step_round.take([nn.Parameter(torch.ones(1))]) == []  # another's
    parameters[3].grad = torch.ones(4, 3)
    assert [member.parameter for member in step_round.take_rest()] == [parameters[0], parameters[3]]
