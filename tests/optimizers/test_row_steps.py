"""Compiled steps in rows: as the operators step the same moments, in a few calls, and nothing where they cannot."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_optimizer import Lion
from support.devices import DEVICE
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vram.core.tensors.codecs import LowBitTensor
from lightning_vram.optimizers import row_steps
from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.optimizers.moment_forms import FORMS
from lightning_vram.optimizers.row_steps import RowSteps, can_run, compile_ahead, rule_of
from lightning_vram.private_names.dispatcher import without_dispatch

# Large and small ones, whole rows and not: 2 slices and a rest of 77 in place, others in 2 gathered parts.
SHAPES = ((1024, 192), (4097,), (64, 128), (2**16 + 77,), (5000,), (16384,))
SMALL = ((130,), (1,), (3, 5))  # which have no quantized moments
INDUCTOR = row_steps.compile_function
EAGER = partial(torch.compile, fullgraph=True, dynamic=True, backend="eager")


@pytest.fixture(autouse=True)
def _rows_on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(row_steps, "DEVICES", {"cpu", DEVICE})
    monkeypatch.setattr(row_steps, "compile_function", lambda plain: plain)
    monkeypatch.setattr(row_steps, "SLICE", 2**17 - 2**10)  # draws repeat after 2**16 places
    monkeypatch.setattr(row_steps, "GATHERED", 2**15)
    monkeypatch.setattr(row_steps, "_failures", [])
    row_steps._function.cache_clear()
    yield
    row_steps._function.cache_clear()


class Stepper:
    """Parameters that are stepped in rows."""

    def __init__(
        self, optimizer: Optimizer, form: str, parameters: Sequence[nn.Parameter], numbers: Sequence[int] | None = None
    ) -> None:
        self.optimizer, self.parameters = optimizer, parameters
        rule = rule_of(optimizer, self.settings)
        assert rule is not None
        for parameter in parameters:
            for key in rule.keys:
                moment = optimizer.state[parameter].setdefault(key, FORMS[form].empty(key, parameter))
                getattr(moment, "records", moment).zero_()
        moments = [[optimizer.state[one][key].view(-1) for key in rule.keys] for one in parameters]
        weights = [one.detach().view(-1) for one in parameters]
        made = RowSteps.make(rule, weights, moments, numbers or range(len(weights)), [0] * len(weights))
        assert made is not None
        self.rows, self.keys = made, rule.keys

    @property
    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}

    def step(self, count: int, dtype: torch.dtype = torch.float32) -> None:
        self.rows.step([one.grad.to(dtype).view(-1) for one in self.parameters], self.settings, count)


def random_parameters(shapes: Sequence[tuple[int, ...]], device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]


def set_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 10 ** float(torch.randn(()))


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


def compare(make: Callable[..., Optimizer], form: str, num_steps: int = 4) -> None:
    """Step in rows, and as the operators do, from the same states."""
    torch.manual_seed(0)
    theirs = random_parameters(SHAPES + (SMALL if form == "bf16" else ()))
    ours = [nn.Parameter(one.detach().clone()) for one in theirs]
    their_optimizer, our_optimizer = make(theirs, lr=1e-2), make(ours, lr=1e-2)
    LowPrecisionMoments(nn.ParameterList(theirs), FORMS[form]).attach([their_optimizer])
    stepper = Stepper(our_optimizer, form, ours)
    for count in range(1, num_steps + 1):
        for optimizer in (their_optimizer, our_optimizer):  # a schedule
            optimizer.param_groups[0]["lr"] = 1e-2 / count
            if "betas" in optimizer.param_groups[0]:
                optimizer.param_groups[0]["betas"] = (0.9 - count / 50, 0.99)
        set_gradients(theirs)
        for own, their in zip(ours, theirs, strict=True):
            own.grad = their.grad.clone()
        their_optimizer.step()
        stepper.step(count)
        for own, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, their, rtol=2e-6, atol=1e-6)
            for key in stepper.keys:
                moment = our_optimizer.state[own][key]
                off = off_by(moment, their_optimizer.state[their][key], 1e-7 * their.grad.abs().max())
                assert off.max() <= 1
                assert off.count_nonzero() <= 1 + off.numel() / 1000  # other draws would change half of them
                moment.copy_(their_optimizer.state[their][key])
            with torch.no_grad():
                own.copy_(their)


CASES = [
    *((partial(AdamW, fused=True), form) for form in FORMS),
    (partial(Adam, weight_decay=0.1, maximize=True), "8bit"),
    (partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.1), "8bit"),
    (partial(SGD, momentum=0.9, dampening=0.3, maximize=True), "4bit"),
    (Lion, "8bit"),
]
IDS = ["AdamW bf16", "AdamW 8bit", "AdamW 4bit", "Adam", "SGD nesterov", "SGD dampening", "Lion"]


@pytest.mark.parametrize(("make", "form"), CASES, ids=IDS)
def test_a_step_in_rows_is_that_of_the_operators(make, form):
    compare(make, form)


def test_a_captured_graph_takes_the_same_step(monkeypatch):
    monkeypatch.setattr(row_steps, "compile_function", EAGER)
    compare(*CASES[2], num_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "form"), CASES, ids=IDS)
def test_a_step_that_inductor_compiled_is_that_of_the_operators(make, form, monkeypatch):
    monkeypatch.setattr(row_steps, "compile_function", INDUCTOR)
    compare(make, form)
    assert can_run(torch.device("cpu"))  # it has not failed


def test_shards_round_as_the_whole_parameter():
    torch.manual_seed(0)
    whole, first, second = random_parameters([(140016,), (70001,), (70015,)])
    with torch.no_grad():
        whole.copy_(torch.cat([first, second]))
    set_gradients([whole])
    rule = rule_of(AdamW([whole]), AdamW([whole]).param_groups[0])
    moments = [[torch.zeros(one.numel(), dtype=torch.bfloat16) for _ in range(2)] for one in (whole, first, second)]
    for parts, numbers, places, pair in (
        ([whole], [3], [0], moments[:1]),
        ([first, second], [3, 3], [0, 70001], moments[1:]),
    ):
        rows = RowSteps.make(rule, [one.detach() for one in parts], pair, numbers, places)
        rows.step(list(whole.grad.split([one.numel() for one in parts])), AdamW([whole]).param_groups[0], 1)
    assert torch.equal(whole, torch.cat([first, second]))
    for moment, *pieces in zip(*moments, strict=True):
        assert torch.equal(moment, torch.cat(pieces))


@pytest.mark.parametrize("form", ["8bit", "4bit"])
def test_garbage_after_the_end_of_a_parameter_changes_no_scale(form, monkeypatch):
    torch.manual_seed(0)
    parameters = random_parameters([(4097,), (5000,)])
    twins = [nn.Parameter(one.detach().clone()) for one in parameters]
    set_gradients(parameters)
    clean, dirty = (Stepper(AdamW(some), form, some) for some in (parameters, twins))
    for one, twin in zip(parameters, twins, strict=True):
        twin.grad = one.grad
    for stepper, garbage in ((clean, 0), (dirty, 0x7FFF)):  # as float32: zeros, NaN
        monkeypatch.setattr(Tensor, "new_empty", lambda self, size, garbage=garbage: self.new_full((size,), garbage))
        stepper.step(1)
    for one, twin in zip(parameters, twins, strict=True):
        assert torch.equal(one, twin)
        for key in clean.keys:
            records = [step.optimizer.state[p][key].records for step, p in ((clean, one), (dirty, twin))]
            assert torch.equal(*records)
            assert records[0][-1, -4:].clone().view(torch.float32).isfinite()


def test_a_block_with_a_gradient_that_is_not_finite_has_a_scale_of_nan():
    (parameter,) = random_parameters([(4096,)])
    parameter.grad = torch.ones(4096)
    parameter.grad[130] = math.inf
    stepper = Stepper(SGD([parameter], momentum=0.9), "8bit", [parameter])
    stepper.step(1)
    is_nan = stepper.optimizer.state[parameter]["momentum_buffer"].decode().isnan()
    assert is_nan.view(-1, 128).all(1).nonzero().tolist() == [[1]]
    assert int(is_nan.sum()) == 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_upcast(dtype):
    torch.manual_seed(0)
    parameters = random_parameters([(4097,), (2**16,)])
    twins = [nn.Parameter(one.detach().clone()) for one in parameters]
    set_gradients(parameters)
    for one, twin in zip(parameters, twins, strict=True):
        one.grad = one.grad.to(dtype).float()
        twin.grad = one.grad
    steppers = [Stepper(AdamW(some), "8bit", some) for some in (parameters, twins)]
    steppers[0].step(1)
    steppers[1].step(1, dtype)
    assert all(map(torch.equal, parameters, twins))
    gradients = [one.grad.view(-1) for one in twins]
    steppers[0].step(2)
    steppers[1].rows.step([gradients[0].to(dtype), gradients[1]], steppers[1].settings, 2)
    assert all(map(torch.equal, parameters, twins))


def test_shapes_settings_and_step_counts_compile_nothing_more(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(row_steps, "compile_function", partial(EAGER, backend=counter))
    parameters = random_parameters([(1024, 192), (4096,), (128, 128), (2**16,), (2**16 + 1,), (128, 512)])
    optimizer = AdamW(parameters)
    compile_ahead(torch.device("cpu"), rule_of(optimizer, optimizer.param_groups[0]), FORMS["8bit"])
    assert counter.frame_count == 2  # in place, and gathered
    set_gradients(parameters)
    for count, some in enumerate((parameters, parameters[1:2], parameters[2:3], parameters[3:], parameters[::2]), 1):
        optimizer.param_groups[0].update(lr=0.1 / count, betas=(0.9 - count / 50, 0.99), weight_decay=count / 10)
        Stepper(optimizer, "8bit", some).step(count)
    (single,) = one_row = random_parameters([(100,)])
    single.grad = torch.ones(100)
    monkeypatch.setattr(row_steps, "compile_function", partial(EAGER, backend=CompileCounter()))
    assert Stepper(AdamW(one_row), "bf16", one_row).rows.num_launches == 3
    assert counter.frame_count == 2


def test_a_compiler_that_fails_is_named_once_and_not_asked_again(monkeypatch, caplog):
    def fail(*arguments):
        raise RuntimeError("no compiler\nat all")

    (parameter,) = random_parameters([(4096,)])
    rule = rule_of(AdamW([parameter]), AdamW([parameter]).param_groups[0])
    moments = [FORMS["8bit"].empty(key, parameter) for key in rule.keys]
    monkeypatch.setattr(row_steps, "compile_function", lambda plain: fail)
    for _ in range(2):
        assert RowSteps.make(rule, [parameter.detach()], [moments], [0], [0]) is None
    assert not can_run(torch.device("cpu"))
    assert [record.message for record in caplog.records] == [
        "Optimizer steps launch more kernels than needed: torch.compile failed (RuntimeError: no compiler)."
    ]


def test_a_dtype_of_gradients_that_fails_to_compile_is_stepped_without(monkeypatch, caplog):
    def compile_float32(plain):
        def run(weights, gradient, *others):
            if gradient.dtype != torch.float32:
                raise RuntimeError("no such dtype")
            plain(weights, gradient, *others)

        return run

    monkeypatch.setattr(row_steps, "compile_function", compile_float32)
    parameters = [nn.Parameter(torch.ones(4096)) for _ in range(2)]
    for one, dtype in zip(parameters, (torch.float32, torch.bfloat16), strict=True):
        one.grad = torch.ones(4096)
        stepper = Stepper(AdamW([one]), "8bit", [one])
        stepper.step(1, dtype)
    assert torch.equal(*parameters)
    assert "torch.compile failed (RuntimeError: no such dtype)" in caplog.text
    assert not can_run(torch.device("cpu"))


def test_parameters_that_rows_do_not_fit_are_left_to_others():
    first, second = random_parameters([(4096,), (4096,)])
    tiny = nn.Parameter(torch.randn(100))  # in one block of 100
    rule = rule_of(AdamW([first]), AdamW([first]).param_groups[0])

    def make(parameters, *forms):
        moments = [
            [FORMS[form].empty(key, one) for key in rule.keys] for one, form in zip(parameters, forms, strict=True)
        ]
        places = [0] * len(parameters)
        return RowSteps.make(rule, [one.detach() for one in parameters], moments, places, places)

    assert make([first, second], "8bit", "8bit") is not None
    assert make([first, second], "8bit", "4bit") is None
    assert make([tiny], "8bit") is None
    assert make([], *[]) is None
    with torch.no_grad():
        plain = [[torch.zeros(4096), torch.zeros(4096)]]
        assert RowSteps.make(rule, [first.detach()], plain, [0], [0]) is None
    assert make([nn.Parameter(first.detach().double())], "8bit") is None
    assert make([nn.Parameter(torch.empty(4096, device="meta"))], "8bit") is None
    with FakeTensorMode():
        assert not can_run(torch.device("cpu"))
    with TorchDispatchMode():
        assert not can_run(torch.device("cpu"))
    assert can_run(torch.device("cpu"))


def test_other_optimizers_and_settings_have_no_rule():
    def rule(kind, **settings):
        optimizer = kind(random_parameters([(2, 2)]), lr=1e-3)
        return rule_of(optimizer, optimizer.param_groups[0] | settings)

    assert rule(AdamW) is rule(Adam) is not None
    assert rule(SGD) is rule(RMSprop) is None
    for settings in ({"amsgrad": True}, {"differentiable": True}, {"capturable": True}):
        assert rule(AdamW, **settings) is None
    assert rule(AdamW, lr=torch.tensor(0.1)) is rule(AdamW)
    assert rule(AdamW, lr=torch.tensor(0.1, device="meta")) is None
    assert rule(Lion) is not None
    assert rule(Lion, weight_decouple=False) is None
    scaled = AdamW(random_parameters([(2, 2)]))
    scaled.grad_scale = torch.ones(())
    assert rule_of(scaled, scaled.param_groups[0]) is None


class CallCounter(TorchDispatchMode):
    """Notes operators that write: views and new memory launch nothing.

    What PyTorch calls is counted, as a simulated device runs lists one by one: CUDA has a kernel for up to 64 tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = any(one.alias_info and not one.alias_info.is_write for one in func._schema.arguments)
        if not is_view and func not in (torch.ops.aten.new_empty.default, torch.ops.aten._local_scalar_dense.default):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.device
@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_600_parameters_makes_three_calls_for_each_part(form, monkeypatch):
    monkeypatch.setattr(row_steps, "GATHERED", 2**22)
    calls = []

    def compile_unseen(plain):
        def run(*arguments):
            calls.append(len(arguments[0]))
            with without_dispatch():
                plain(*arguments)

        return run

    monkeypatch.setattr(row_steps, "compile_function", compile_unseen)
    shapes = [(4096,), (64, 65)] * 300
    parameters = [*random_parameters(shapes, DEVICE), *random_parameters([(2**16,)], DEVICE)]
    stepper = Stepper(AdamW(parameters), form, parameters)
    set_gradients(parameters)
    stepper.step(1)
    calls.clear()
    with CallCounter() as counter:
        stepper.step(2)
    assert len(calls) == 2  # in place, and gathered
    assert [name for name in counter.names if "cpu" not in name] == ["aten._foreach_copy_.default"] * 2
    assert stepper.rows.num_launches == len(calls) + len(counter.names) == 4
