"""States that are saved and loaded: by the same scheme, by a plain run and from one."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.lean_nets import assert_same_weights, lean_net, make_net, take_steps
from torch import optim

from lightning_vram.optimizers.bf16_weights import SCHEMES, LeanParameters


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr("lightning_vram.optimizers.bf16_weights.CHUNK_ELEMENTS", 400)


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


KINDS: list[Callable[..., optim.Optimizer]] = [
    optim.NAdam,  # keeps a product without dimensions
    optim.Adafactor,  # keeps statistics of rows and columns
    optim.Adagrad,  # has a state before the first step
    lambda parameters: optim.Adam(parameters, fused=True),
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS, ids=["NAdam", "Adafactor", "Adagrad", "fused Adam"])
def test_a_run_goes_on_to_the_bit(scheme, kind):
    net, lean, optimizer = lean_net(scheme, kind)
    take_steps(net, optimizer, 0, 1, 2)
    saved = through_a_file([lean.full_state(net.state_dict()), optimizer.state_dict(), lean.num_steps])
    take_steps(net, optimizer, 3, 4)

    resumed = make_net()
    torch.nn.init.zeros_(resumed[0].weight)
    resumed.load_state_dict(saved[0])
    resumed_lean = LeanParameters(resumed.parameters(), scheme)
    resumed_optimizer = kind(resumed.parameters())
    resumed_lean.attach([resumed_optimizer])
    resumed_optimizer.load_state_dict(saved[1])
    resumed_lean.num_steps = saved[2]
    assert {id(p) for p in resumed_optimizer.state} == {id(p) for p in resumed.parameters()}
    take_steps(resumed, resumed_optimizer, 3, 4)
    states = zip(optimizer.state.values(), resumed_optimizer.state.values(), strict=True)
    for state, expected in states:
        assert all(state[key].dtype is expected[key].dtype for key in state)
        assert all(torch.equal(state[key], expected[key]) for key in state)
    lean.restore()
    resumed_lean.restore()
    assert_same_weights(resumed, net)


def test_without_the_number_of_steps_other_numbers_are_drawn():
    results = []
    for num_steps in (5, 5, 6, 5 + 2**12, 5 + 2**20):
        net, lean, optimizer = lean_net("bf16+stochastic")
        lean.num_steps = num_steps
        take_steps(net, optimizer, 0)
        assert lean.num_steps == num_steps + 1
        results.append(net[0].weight.detach())
    assert [torch.equal(result, results[0]) for result in results] == [True, True, False, False, False]


@pytest.mark.parametrize("scheme", ["bf16+kahan", "bf16+stochastic"])
def test_narrow_states_are_loaded_by_plain_runs_and_made_of_wide_ones(scheme):
    net, _, optimizer = lean_net(scheme)
    plain = make_net()
    reference = optim.AdamW(plain.parameters())
    take_steps(plain, reference, 0)
    optimizer.load_state_dict(reference.state_dict())
    for parameter, original in zip(net.parameters(), plain.parameters(), strict=True):
        state, expected = optimizer.state[parameter], reference.state[original]
        assert torch.equal(state["exp_avg"], expected["exp_avg"].bfloat16())
        assert torch.equal(state["step"], expected["step"])
    reference.load_state_dict(optimizer.state_dict())
    take_steps(plain, reference, 1)
