"""Compiled steps in rows: as the operators step the same moments, in a few calls, and nothing where they cannot."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pytorch_optimizer import Lion
from support.devices import DEVICE
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vram.core.tensors.codecs import LowBitTensor
from lightning_vram.optimizers import row_steps
from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.optimizers.moment_forms import FORMS
from lightning_vram.optimizers.row_steps import StepPlan, Stored, can_run, compile_ahead, is_ruled, plan_rows, rule_of
from lightning_vram.private_names.dispatcher import without_dispatch

# Large and small ones, whole rows and not: 3 slices in place, others in 2 gathered parts.
SHAPES = ((1024, 192), (4097,), (64, 128), (2**16 + 128,), (5000,), (16384,))
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

    def __init__(self, optimizer: Optimizer, form: str, parameters: Sequence[nn.Parameter]) -> None:
        self.optimizer, self.parameters = optimizer, parameters
        rule = rule_of(optimizer)
        assert rule is not None
        for parameter in parameters:
            for key in rule.keys:
                moment = optimizer.state[parameter].setdefault(key, FORMS[form].empty(key, parameter))
                getattr(moment, "records", moment).zero_()
        moments = [[optimizer.state[one][key] for key in rule.keys] for one in parameters]
        made = plan_rows(rule, list(map(Stored, parameters, moments, count(), [0] * len(parameters))))
        assert made is not None
        self.rows, self.keys = made, rule.keys

    @property
    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}

    def step(self, number: int) -> None:
        self.rows.step([one.grad for one in self.parameters], self.settings, number)


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
    for number in range(1, num_steps + 1):
        for optimizer in (their_optimizer, our_optimizer):  # a schedule
            optimizer.param_groups[0]["lr"] = 1e-2 / number
            if "betas" in optimizer.param_groups[0]:
                optimizer.param_groups[0]["betas"] = (0.9 - number / 50, 0.99)
        set_gradients(theirs)
        for own, their in zip(ours, theirs, strict=True):
            own.grad = their.grad.clone()
        with patch.object(StepPlan, "step", lambda plan: False):
            their_optimizer.step()
        stepper.step(number)
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
    whole, first, second = random_parameters([(140032,), (70016,), (70016,)])
    with torch.no_grad():
        whole.copy_(torch.cat([first, second]))
    set_gradients([whole])
    rule = rule_of(AdamW([whole]))
    moments = [[torch.zeros(one.numel(), dtype=torch.bfloat16) for _ in range(2)] for one in (whole, first, second)]
    for parts, numbers, places, pair in (
        ([whole], [3], [0], moments[:1]),
        ([first, second], [3, 3], [0, 70016], moments[1:]),
    ):
        rows = plan_rows(rule, list(map(Stored, parts, pair, numbers, places)))
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


def test_shapes_settings_and_step_counts_compile_nothing_more(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(row_steps, "compile_function", partial(EAGER, backend=counter))
    parameters = random_parameters([(1024, 192), (4096,), (128, 128), (2**16,), (2**16 + 128,), (128, 512)])
    optimizer = AdamW(parameters)
    compile_ahead(torch.device("cpu"), rule_of(optimizer), FORMS["8bit"])
    assert counter.frame_count == 2  # in place, and gathered
    set_gradients(parameters)
    for number, some in enumerate((parameters, parameters[1:2], parameters[2:3], parameters[3:], parameters[::2]), 1):
        optimizer.param_groups[0].update(lr=0.1 / number, betas=(0.9 - number / 50, 0.99), weight_decay=number / 10)
        Stepper(optimizer, "8bit", some).step(number)
    assert counter.frame_count == 2


def test_a_single_row_compiles_nothing_more(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(row_steps, "compile_function", partial(EAGER, backend=counter))
    (single,) = one_row = random_parameters([(100,)])
    single.grad = torch.ones(100)
    Stepper(AdamW(one_row), "bf16", one_row).step(1)
    assert counter.frame_count == 2  # in place, and gathered


def test_a_compiler_that_fails_is_named_once_and_not_asked_again(monkeypatch, caplog):
    def fail(*arguments):
        raise RuntimeError("no compiler\nat all")

    (parameter,) = random_parameters([(4096,)])
    rule = rule_of(AdamW([parameter]))
    moments = [FORMS["8bit"].empty(key, parameter) for key in rule.keys]
    monkeypatch.setattr(row_steps, "compile_function", lambda plain: fail)
    for _ in range(2):
        assert plan_rows(rule, [Stored(parameter, moments, 0, 0)]) is None
    assert not can_run(torch.device("cpu"))
    assert [record.message for record in caplog.records] == [
        "Optimizer steps launch more kernels than needed: torch.compile failed (RuntimeError: no compiler)."
    ]


def test_parameters_that_rows_do_not_fit_are_left_to_others():
    first, second = random_parameters([(4096,), (4096,)])
    tiny = nn.Parameter(torch.randn(100))  # in one block of 100
    rule = rule_of(AdamW([first]))

    def make(parameters, *forms):
        moments = [
            [FORMS[form].empty(key, one) for key in rule.keys] for one, form in zip(parameters, forms, strict=True)
        ]
        return plan_rows(rule, list(map(Stored, parameters, moments, count(), [0] * len(parameters))))

    assert make([first, second], "8bit", "8bit") is not None
    assert make([first, second], "8bit", "4bit") is None
    assert make([tiny], "8bit") is None
    assert make([], *[]) is None
    assert plan_rows(rule, [Stored(first, [torch.zeros(4096)] * 2, 0, 0)]) is None
    assert make([nn.Parameter(torch.zeros(2**16 + 1))], "8bit") is None  # large, with a shorter last row
    assert make([nn.Parameter(first.detach().double())], "8bit") is None
    assert make([nn.Parameter(torch.empty(4096, device="meta"))], "8bit") is None
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


@pytest.fixture
def calls(monkeypatch):
    """The rows of each call of a compiled function, which a mode sees nothing of."""
    found: list[int] = []

    def compile_unseen(plain):
        def run(*arguments):
            found.append(len(arguments[0]))
            with without_dispatch():
                plain(*arguments)

        return run

    monkeypatch.setattr(row_steps, "compile_function", compile_unseen)
    monkeypatch.setattr(row_steps, "GATHERED", 2**22)
    return found


@pytest.mark.device
@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_600_parameters_makes_three_calls_for_each_part(form, calls):
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
    assert len(calls) + len(counter.names) == 4


def make_run(sizes: Sequence[int], devices: Sequence[str]) -> tuple[list[nn.Parameter], Optimizer, LowPrecisionMoments]:
    """Return parameters in two groups, their optimizer, and its moments in 8 bits."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size).to(device)) for size, device in zip(sizes, devices, strict=True)]
    half = len(parameters) // 2
    groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 1e-2}]
    optimizer = AdamW(groups, lr=1e-3)
    moments = LowPrecisionMoments(nn.ParameterList(parameters), FORMS["8bit"])
    moments.attach([optimizer])
    return parameters, optimizer, moments


def step_with_gradients(parameters: Sequence[nn.Parameter], optimizer: Optimizer, number: int) -> None:
    torch.manual_seed(number)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(parameter.device)
    optimizer.step()


@pytest.mark.device
def test_planned_steps_of_600_parameters_make_three_calls_for_each_part(calls, monkeypatch):
    devices = [DEVICE] * 600
    parameters, optimizer, moments = make_run([4096, 4160] * 299 + [2**16, 2**16], devices)
    for number in range(2):
        step_with_gradients(parameters, optimizer, number)
    calls.clear()
    monkeypatch.setattr(row_steps, "current_dispatch_mode", lambda: None)  # the one that counts
    with CallCounter() as counter:
        optimizer.step()
    assert len(calls) == 4  # the two large ones in place, and the small ones of each group
    names = [name for name in counter.names if not name.startswith("profiler")]
    assert names == [*["aten._foreach_copy_.default"] * 4, "aten._foreach_add_.Scalar"]  # of the counts
    moments.let_go()


@pytest.mark.device
def test_an_interrupted_run_of_planned_steps_goes_on_with_the_same_bits():
    sizes = [4096, 4160, 2**16, 4099, 9000]
    ours, optimizer, moments = make_run(sizes, [DEVICE] * len(sizes))
    for number in range(3):
        step_with_gradients(ours, optimizer, number)
    theirs, other, other_moments = make_run(sizes, [DEVICE] * len(sizes))
    for own, their in zip(ours, theirs, strict=True):
        their.data.copy_(own.data)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in (3, 4):
        step_with_gradients(ours, optimizer, number)
        step_with_gradients(theirs, other, number)
    for own, their in zip(ours, theirs, strict=True):
        assert torch.equal(own, their)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[own][key].records, other.state[their][key].records)
    moments.let_go()
    other_moments.let_go()


@pytest.mark.device
def test_parameters_on_two_devices_are_stepped_each_on_its_own():
    devices = ["cpu", DEVICE, DEVICE, "cpu"]
    ours, optimizer, moments = make_run([4096, 4096, 4160, 8192], devices)
    theirs, other, other_moments = make_run([4096, 4096, 4160, 8192], ["cpu"] * 4)
    for number in range(3):
        step_with_gradients(ours, optimizer, number)
        step_with_gradients(theirs, other, number)
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.cpu(), their, rtol=1e-3, atol=1e-4)
    moments.let_go()
    other_moments.let_go()


@pytest.mark.device
def test_a_plan_does_not_keep_moments_that_were_dropped():
    parameters, optimizer, moments = make_run([4096, 2**16], [DEVICE] * 2)
    for number in range(2):
        step_with_gradients(parameters, optimizer, number)
    memory = [
        StorageWeakRef(state[key].records.untyped_storage())
        for state in optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    assert not any(one.expired() for one in memory)
    optimizer.state.clear()
    assert all(one.expired() for one in memory)
    step_with_gradients(parameters, optimizer, 2)
    assert all(int(optimizer.state[one]["step"]) == 1 for one in parameters)
    moments.let_go()
