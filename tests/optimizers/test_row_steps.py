"""Compiled steps in rows: as the operators step the same moments, and nothing where they cannot."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from pytorch_optimizer import Lion
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vram.core.tensors.codecs import LowBitTensor
from lightning_vram.optimizers import low_precision
from lightning_vram.optimizers.low_precision import LowPrecisionMoments, can_run, rule_of, step_rows
from lightning_vram.optimizers.moment_forms import FORMS, UpdateCheck
from lightning_vram.optimizers.step_round import Member, StepRound, is_ruled

# Whole rows and not: the first in three slices.
SHAPES = ((1024, 192), (4097,), (64, 128), (2**16 + 128,), (5000,), (16384,))
SMALL = ((130,), (1,), (3, 5), (256,), (128,))  # which have no quantized moments
INDUCTOR = low_precision.compile_function
EAGER = partial(torch.compile, fullgraph=True, dynamic=True, backend="eager")


@pytest.fixture(autouse=True)
def _rows_on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(low_precision, "DEVICES", {"cpu"})
    monkeypatch.setattr(low_precision, "compile_function", lambda plain: plain)
    monkeypatch.setattr(low_precision, "SLICE", 2**17 - 2**10)  # draws repeat after 2**16 places
    monkeypatch.setattr(low_precision, "_failures", [])
    low_precision._function.cache_clear()
    yield
    low_precision._function.cache_clear()


@pytest.fixture
def in_rows(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of the parameters that rows step, of each step."""
    found: list[list[int]] = []

    def note(step_round: StepRound, rule: object, members: Sequence[Member]) -> list[Member]:
        left = step_rows(step_round, rule, members)
        found.append([one.number for one in members if one not in left])
        return left

    monkeypatch.setattr(low_precision, "step_rows", note)
    return found


def random_parameters(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def set_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 10 ** float(torch.randn(()))


def attach(optimizer: Optimizer, form: str, check: UpdateCheck | None = None) -> LowPrecisionMoments:
    weights = nn.ParameterList(weight for group in optimizer.param_groups for weight in group["params"])
    moments = LowPrecisionMoments(weights, FORMS[form], check=check)
    moments.attach([optimizer])
    return moments


def step_members(optimizer: Optimizer) -> list[Member]:
    """Step in rows; return what they do not step."""
    step_round = StepRound(optimizer, is_on_host=False)
    return step_rows(step_round, rule_of(optimizer), step_round.take_rest())


def give_moments(optimizer: Optimizer, form: str) -> None:
    """Begin with moments of zero in a form."""
    rule = rule_of(optimizer)
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        moments = {key: FORMS[form].empty(key, parameter) for key in rule.keys}
        for moment in moments.values():
            getattr(moment, "records", moment).zero_()
        steps = {"step": torch.tensor(0.0)} if "exp_avg_sq" in moments else {}
        optimizer.state[parameter] = steps | moments


def off_by(ours: Tensor, theirs: Tensor, noise: Tensor) -> Tensor:
    """By how many units of its form a moment differs; bf16 numbers may differ by the noise of float32."""
    if isinstance(ours, LowBitTensor):
        scales = [one.records[:, -4:].clone().view(torch.float32) for one in (ours, theirs)]
        assert torch.allclose(*scales, rtol=1e-6)
        ours, theirs = (one.records[:, :-4] for one in (ours, theirs))
        if ours.shape[1] == 64:  # two codes in each byte
            ours, theirs = (torch.stack([one & 15, one >> 4]) for one in (ours, theirs))
    else:
        is_off = (ours.float() - theirs.float()).abs() > noise
        ours, theirs = (torch.where(is_off, one.view(torch.int16), 0) for one in (ours, theirs))
    return (ours.int() - theirs.int()).abs()


def compare(make: Callable[..., Optimizer], form: str) -> None:
    """Step in rows, and as the operators do, from the same states."""
    torch.manual_seed(0)
    theirs = random_parameters(SHAPES + (SMALL if form == "bf16" else ()))
    ours = [nn.Parameter(one.detach().clone()) for one in theirs]
    their_optimizer, our_optimizer = make(theirs, lr=1e-2), make(ours, lr=1e-2)
    kept = [attach(one, form) for one in (their_optimizer, our_optimizer)]
    for number in range(1, 4):
        for optimizer in (their_optimizer, our_optimizer):  # a schedule
            optimizer.param_groups[0]["lr"] = 1e-2 / number
            if "betas" in optimizer.param_groups[0]:
                optimizer.param_groups[0]["betas"] = (0.9 - number / 50, 0.99)
        set_gradients(theirs)
        for own, their in zip(ours, theirs, strict=True):
            own.grad = their.grad.clone()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(low_precision, "step_rows", lambda step_round, rule, members: members)
            their_optimizer.step()
        our_optimizer.step()
        for own, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, their, rtol=2e-6, atol=1e-6)
            for key in rule_of(our_optimizer).keys:
                moment = our_optimizer.state[own][key]
                off = off_by(moment, their_optimizer.state[their][key], 1e-7 * their.grad.abs().max())
                assert off.max() <= 1
                assert off.count_nonzero() <= 1 + off.numel() / 1000  # other draws would change half of them
                moment.copy_(their_optimizer.state[their][key])
            with torch.no_grad():
                own.copy_(their)
    for one in kept:
        one.let_go()


CASES = [
    *((partial(AdamW, fused=True), form) for form in FORMS),
    (partial(Adam, weight_decay=0.1, maximize=True), "8bit"),
    (partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.1), "8bit"),
    (partial(SGD, momentum=0.9, dampening=0.3, maximize=True), "4bit"),
    (Lion, "8bit"),
]
IDS = ["AdamW bf16", "AdamW 8bit", "AdamW 4bit", "Adam", "SGD nesterov", "SGD dampening", "Lion"]


@pytest.mark.parametrize(("make", "form"), CASES, ids=IDS)
def test_a_step_in_rows_is_that_of_the_operators(make, form, in_rows):
    compare(make, form)
    whole = [0, 2, 3, 5] + ([9] if form == "bf16" else [])
    assert in_rows == [[], whole, whole]  # the first step makes the states


@pytest.mark.slow
@pytest.mark.parametrize(("make", "form"), CASES, ids=IDS)
def test_a_step_that_inductor_compiled_is_that_of_the_operators(make, form, monkeypatch):
    monkeypatch.setattr(low_precision, "compile_function", INDUCTOR)
    compare(make, form)
    assert can_run(torch.device("cpu"))  # it has not failed


def test_a_block_with_a_gradient_that_is_not_finite_has_a_scale_of_nan():
    (parameter,) = random_parameters([(4096,)])
    parameter.grad = torch.ones(4096)
    parameter.grad[130] = math.inf
    optimizer = SGD([parameter], momentum=0.9)
    give_moments(optimizer, "8bit")
    assert not step_members(optimizer)
    is_nan = optimizer.state[parameter]["momentum_buffer"].decode().isnan()
    assert is_nan.view(-1, 128).all(1).nonzero().tolist() == [[1]]
    assert int(is_nan.sum()) == 128


def test_shapes_settings_and_step_counts_compile_nothing_more(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(low_precision, "compile_function", partial(EAGER, backend=counter))
    parameters = random_parameters([(1024, 192), (4096,), (128, 128), (2**16,), (256,)])
    optimizer = AdamW(parameters)
    give_moments(optimizer, "8bit")
    for number, some in enumerate((parameters, parameters[1:2], parameters[2:3], parameters[3:], parameters[::2]), 1):
        optimizer.param_groups[0].update(lr=0.1 / number, betas=(0.9 - number / 50, 0.99), weight_decay=number / 10)
        optimizer.zero_grad()
        set_gradients(some)
        assert not step_members(optimizer)
    assert counter.frame_count == 1


def test_a_compiler_that_fails_is_named_once_and_not_asked_again(monkeypatch, caplog):
    def fail(*arguments):
        raise RuntimeError("no compiler\nat all")

    parameters = random_parameters([(4096,)] * 2)
    set_gradients(parameters)
    optimizer = AdamW(parameters)
    give_moments(optimizer, "8bit")
    monkeypatch.setattr(low_precision, "compile_function", lambda plain: fail)
    for _ in range(2):
        assert [one.number for one in step_members(optimizer)] == [0, 1]
    assert not can_run(torch.device("cpu"))
    assert [record.message for record in caplog.records] == [
        "Optimizer steps launch more kernels than needed: torch.compile failed (RuntimeError: no compiler)."
    ]


def test_parameters_that_rows_do_not_fit_are_left_to_others():
    parameters = [
        *random_parameters([(4096,), (100,), (128,), (2**16 + 1,)]),
        nn.Parameter(torch.zeros(4096, dtype=torch.float64)),
        nn.Parameter(torch.empty(4096, device="meta")),
        *random_parameters([(4096,)] * 3),
    ]
    optimizer = SGD(parameters, momentum=0.9)
    give_moments(optimizer, "bf16")
    set_gradients(parameters[:5] + parameters[6:])
    parameters[5].grad = torch.empty(4096, device="meta")
    optimizer.state[parameters[6]]["momentum_buffer"] = None
    optimizer.state[parameters[7]].clear()
    optimizer.state[parameters[8]]["more"] = torch.zeros(4096)
    assert [one.number for one in step_members(optimizer)] == [*range(1, 9)]
    with FakeTensorMode():
        assert not can_run(torch.device("cpu"))
    with TorchDispatchMode():
        assert not can_run(torch.device("cpu"))
    assert can_run(torch.device("cpu"))


def test_other_optimizers_and_settings_have_no_rule():
    def is_known(kind, **settings):
        optimizer = kind(random_parameters([(2, 2)]), lr=1e-3)
        return is_ruled(optimizer, optimizer.param_groups[0] | settings)

    parameters = random_parameters([(2, 2)])
    assert rule_of(AdamW(parameters)) is rule_of(Adam(parameters)) is not None
    assert rule_of(RMSprop(parameters)) is None
    assert rule_of(Lion(parameters, lr=1e-3)) is not None
    assert not is_known(SGD)
    assert is_known(SGD, momentum=0.9)
    for settings in ({"amsgrad": True}, {"differentiable": True}, {"capturable": True}):
        assert not is_known(AdamW, **settings)
    assert is_known(AdamW, lr=torch.tensor(0.1))
    assert not is_known(AdamW, lr=torch.tensor(0.1, device="meta"))
    assert is_known(Lion)
    assert not is_known(Lion, weight_decouple=False)
    scaled = AdamW(parameters)
    scaled.grad_scale = torch.ones(())
    assert not is_ruled(scaled, scaled.param_groups[0])


def test_lost_updates_are_counted_outside_of_rows(in_rows):
    weights = random_parameters([(4096,)])
    optimizer, check = AdamW(weights, fused=True), UpdateCheck(lambda: True)
    attach(optimizer, "bf16", check)
    for _ in range(3):
        set_gradients(weights)
        check.begin()
        optimizer.step()
    assert check.share is not None
    assert not in_rows
