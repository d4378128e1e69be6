"""Steps that are planned: the bits of those that are planned anew each time, whatever a program does in between."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_vram.core.tensors.codecs import LowBitTensor
from lightning_vram.optimizers import row_steps, step_loop
from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.optimizers.moment_forms import FORMS, UpdateCheck
from lightning_vram.optimizers.row_steps import StepPlan
from lightning_vram.optimizers.step_round import StepRound

LAYERS = (160, 4096, 7, 65536, 130)


@pytest.fixture(autouse=True)
def _rows_on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(row_steps, "DEVICES", {"cpu"})
    monkeypatch.setattr(row_steps, "compile_function", lambda plain: plain)
    row_steps._function.cache_clear()
    yield
    row_steps._function.cache_clear()


@pytest.fixture
def planned(monkeypatch):
    """Whether each planned step was made."""
    found: list[bool] = []
    step = StepPlan.step

    def note(plan: StepPlan) -> bool:
        found.append(step(plan))
        return found[-1]

    monkeypatch.setattr(StepPlan, "step", note)
    return found


def nothing(optimizer: AdamW, number: int) -> None:
    pass


def train(form: str, change: Any = nothing, *, is_planned_anew: bool = False, **options: Any) -> list[Tensor]:
    """Step five parameters in two groups; return weights and states."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, generator=generator)) for size in LAYERS]
    module = nn.ParameterList(weights)
    groups = [{"params": weights[:3]}, {"params": weights[3:], "lr": 1e-3, "weight_decay": 0.1}]
    optimizer = AdamW(groups, lr=1e-2, **({"fused": True} | options))
    moments = LowPrecisionMoments(module, FORMS[form])
    moments.attach([optimizer])
    for number in range(8):
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            weight.grad = torch.randn(weight.shape, generator=generator)
        change(optimizer, number)
        if is_planned_anew:
            moments._plans.clear()
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    moments.let_go()
    weights = [weight.detach() for group in optimizer.param_groups for weight in group["params"]]
    return [*weights, *(one.decode() if isinstance(one, LowBitTensor) else one for one in states)]


def is_same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("form", ["bf16", "8bit", "4bit"])
def test_all_steps_but_the_first_are_planned(form, planned):
    theirs = train(form, is_planned_anew=True)
    planned.clear()
    assert is_same(train(form), theirs)
    assert planned == [False, *[True] * 7]  # the first makes the states


def leave_out(optimizer: AdamW, number: int) -> None:
    if number == 4:
        optimizer.param_groups[1]["params"][0].grad = None


def move_rates(optimizer: AdamW, number: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
        group["betas"] = group["betas"][0] * 0.99, 0.99


def clear(optimizer: AdamW, number: int) -> None:
    if number == 4:
        optimizer.state.clear()


def zero(optimizer: AdamW, number: int) -> None:
    if number == 4:
        optimizer.state[optimizer.param_groups[1]["params"][0]]["exp_avg"].zero_()


def replace(optimizer: AdamW, number: int) -> None:
    if number == 4:
        state = optimizer.state[optimizer.param_groups[1]["params"][0]]
        state["exp_avg_sq"] = torch.ones_like(state["exp_avg_sq"].float())


def count_on(optimizer: AdamW, number: int) -> None:
    if number == 4:
        optimizer.state[optimizer.param_groups[1]["params"][0]]["step"].fill_(1000.0)


def add_group(optimizer: AdamW, number: int) -> None:
    if number == 4:
        added = nn.Parameter(torch.ones(4096))
        added.grad = torch.linspace(-1, 1, 4096)
        optimizer.add_param_group({"params": [added], "lr": 0.1})


def move_to_other_group(optimizer: AdamW, number: int) -> None:
    if number == 4:
        first, second = (group["params"] for group in optimizer.param_groups)
        second.insert(0, first.pop())  # in the same order as before


def order_otherwise(optimizer: AdamW, number: int) -> None:
    if number == 4:
        optimizer.param_groups[0]["params"].reverse()


def expand_gradient(optimizer: AdamW, number: int) -> None:
    if number == 4:
        optimizer.param_groups[1]["params"][0].grad = torch.ones(1).expand(65536)


def load(optimizer: AdamW, number: int) -> None:
    if number == 4:
        optimizer.load_state_dict(optimizer.state_dict())


def move_weights(optimizer: AdamW, number: int) -> None:
    weight = optimizer.param_groups[1]["params"][0]
    weight.data = weight.data.clone() * 0.5


def scale(optimizer: AdamW, number: int) -> None:
    is_scaled = number in (4, 5)
    optimizer.grad_scale = torch.tensor(4.0) if is_scaled else None
    optimizer.found_inf = torch.tensor(0.0) if is_scaled else None


@pytest.mark.parametrize("form", ["bf16", "8bit"])
@pytest.mark.parametrize(
    ("change", "num_planned"),
    [
        (leave_out, 7),
        (move_rates, 7),
        (clear, 6),  # the step after it makes the states
        (zero, 7),
        (replace, 7),
        (count_on, 7),
        (add_group, 7),
        (move_to_other_group, 7),
        (order_otherwise, 7),
        (expand_gradient, 7),
        (load, 7),
        (move_weights, 7),
        (scale, 5),
    ],
)
def test_what_a_program_changes_is_seen(form, change, num_planned, planned):
    theirs = train(form, change, is_planned_anew=True)
    planned.clear()
    assert is_same(train(form, change), theirs)
    assert sum(planned) == num_planned


def test_other_steps_are_not_planned(planned):
    train("bf16", amsgrad=True)
    assert not any(planned)


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_a_plan_does_not_keep_moments_that_were_dropped(form, planned):
    weight = nn.Parameter(torch.ones(4096))
    optimizer = AdamW([weight], fused=True)
    moments = LowPrecisionMoments(nn.ParameterList([weight]), FORMS[form])
    moments.attach([optimizer])
    for _ in range(2):
        weight.grad = torch.ones(4096)
        optimizer.step()
    assert planned == [False, True]
    dropped = [weakref.ref(optimizer.state[weight][key]) for key in ("exp_avg", "exp_avg_sq")]
    optimizer.state.clear()
    assert [one() for one in dropped] == [None, None]
    optimizer.step()
    moments.let_go()


def test_lost_updates_are_counted_without_a_plan(planned):
    weight = nn.Parameter(torch.ones(4096))
    optimizer = AdamW([weight], fused=True)
    check = UpdateCheck(lambda: True)
    moments = LowPrecisionMoments(nn.ParameterList([weight]), FORMS["bf16"], check=check)
    moments.attach([optimizer])
    for _ in range(4):
        weight.grad = torch.ones(4096)
        check.begin()
        optimizer.step()
    assert check.share is not None
    assert not any(planned)
    moments.let_go()


def test_lost_updates_are_counted_in_parts(monkeypatch):
    monkeypatch.setattr(step_loop, "PART_ELEMENTS", 1024)
    sizes = []
    step_parts = step_loop.step_parts

    def note(step_round, parts, *others):
        sizes.append([part.size for part in parts])
        step_parts(step_round, parts, *others)

    monkeypatch.setattr(step_loop, "step_parts", note)
    weight = nn.Parameter(torch.ones(4096))
    optimizer = AdamW([weight], fused=True)
    check = UpdateCheck(lambda: True)
    moments = LowPrecisionMoments(nn.ParameterList([weight]), FORMS["bf16"], check=check)
    moments.attach([optimizer])
    for _ in range(2):
        weight.grad = torch.ones(4096)
        check.begin()
        optimizer.step()
    assert [size for size in sizes if size] == [[1024]] * 8
    moments.let_go()


def test_only_parameters_of_one_device_are_planned():
    here, there = (nn.Parameter(torch.ones(4096, device=device)) for device in ("cpu", "meta"))
    optimizer = AdamW([here, there], fused=True)
    for weight in (here, there):
        weight.grad = torch.ones_like(weight)
        moments = {key: torch.zeros_like(weight, dtype=torch.bfloat16) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.tensor(1.0), **moments}
    plan = StepPlan(optimizer, StepRound(optimizer, is_on_host=False).take_rest())
    assert [id(weight) for weight in plan.others] == [id(there)]


def test_a_parameter_that_was_left_out_once_is_planned_again(planned):
    train("bf16", leave_out)
    # The first step, the one without the parameter, and the one that has it again are planned anew.
    assert [number for number, is_known in enumerate(planned) if not is_known] == [0, 4, 6]
