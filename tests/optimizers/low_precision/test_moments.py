"""Moments in fewer bytes without Lightning: their bytes, schedules, and FSDP2."""

import copy
import io
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_optimizer import Lion
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler as schedules

import lightning_vram
from lightning_vram import track_memory
from lightning_vram.core.tensors.codecs import LowBitTensor
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.optimizers.moment_forms import FORMS, KINDS, is_low_precision
from lightning_vram.private_names.fsdp2 import local_shard

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def state_bytes(form: str, make: Any = torch.optim.AdamW, sizes: Any = (64, 128, 64)) -> int:
    """Tracked bytes of states after two steps, without counts of steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))
    parameters = [p for p in model.parameters() if p.dim() > 1 or make is not torch.optim.Muon]
    optimizer = make(parameters, lr=1e-3)
    if form != "fp32":
        LowPrecisionMoments(model, FORMS[form]).attach([optimizer])
    with track_memory(model, optimizers=[optimizer]) as tracker:
        for _ in range(2):
            model(torch.ones(2, sizes[0])).sum().backward()
            optimizer.step()
    steps = sum(one.nbytes for state in optimizer.state.values() for one in state.values() if one.dim() == 0)
    timeline = tracker.timeline
    of_state = {n for n, one in enumerate(timeline.allocations) if one.category is Category.OPTIMIZER_STATE}
    return sum(event.change_bytes for event in timeline.events if event.allocation in of_state) - steps


def test_the_tracker_counts_the_bytes_of_each_weight() -> None:
    assert state_bytes("fp32") == 8 * 16576
    assert state_bytes("bf16") == 4 * 16576
    in_bits, biases = 2 * 64 * 128, 128 + 64
    assert state_bytes("8bit") == 2.0625 * in_bits + 8 * biases
    assert state_bytes("4bit") == 1.0625 * in_bits + 8 * biases
    assert pytest.approx(2.04, rel=0.02) == 2.0625
    assert pytest.approx(1.06, rel=0.02) == 1.0625


PAGE = Path(lightning_vram.__file__).parent / "callbacks/low_bit_optimizer/README.md"
SGD_MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


def read_table() -> dict[str, list[str]]:
    """Return bytes of state per parameter, by the names of the optimizers."""
    lines = PAGE.read_text().split("| Optimizer |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {names: cells for names, *cells in rows}


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        ("Adam, AdamW, Adamax, NAdam, RAdam", KINDS),
        ("SGD with momentum, Lion", [SGD_MOMENTUM, Lion]),
    ],
    ids=["Adam", "SGD with momentum"],
)
def test_bytes_are_those_of_the_page(names, kinds):
    sizes = (512,) * 5
    count = 4 * (512 * 512 + 512)
    for cell, form in zip(read_table()[names], ("fp32", "bf16", "8bit", "4bit"), strict=True):
        for kind in kinds if cell else []:
            assert float(cell) == round(state_bytes(form, kind, sizes) / count, 2)


def train(optimizer: torch.optim.Optimizer, model: nn.Module, num_steps: int) -> None:
    for step in range(num_steps):
        model(torch.linspace(-1, 1, 32).view(2, 16) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_under_fsdp2_moments_are_sharded_and_weights_are_the_same(form, mesh):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 4))
    sharded = copy.deepcopy(plain)
    for part in (sharded[0], sharded[2], sharded):
        fully_shard(part, mesh=mesh)
    optimizers = [ADAMW(plain.parameters()), ADAMW(sharded.parameters())]
    for model, optimizer in zip((plain, sharded), optimizers, strict=True):
        LowPrecisionMoments(model, FORMS[form]).attach([optimizer])
        train(optimizer, model, 3)
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local_shard(ours), theirs)
        moment = optimizers[1].state[ours]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert is_low_precision(local_shard(moment)) == FORMS[form].takes(ours)
    saved = get_optimizer_state_dict(sharded, optimizers[1])
    set_optimizer_state_dict(sharded, optimizers[1], saved)
    for model, optimizer in zip((plain, sharded), optimizers, strict=True):
        train(optimizer, model, 2)
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local_shard(ours), theirs)
        assert is_low_precision(local_shard(optimizers[1].state[ours]["exp_avg"])) == FORMS[form].takes(ours)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": ADAMW,
    "Adam": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(1e-2)),
    "NAdam": torch.optim.NAdam,
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "Lion": partial(Lion, lr=1e-3),
}
SCHEDULES: dict[str, Any] = {
    "steps": lambda one: schedules.StepLR(one, 2, 0.5),
    "lambda": lambda one: schedules.LambdaLR(one, lambda step: 1 / (1 + step)),
    "cosine": lambda one: schedules.CosineAnnealingWarmRestarts(one, 3),
    "one cycle": lambda one: schedules.OneCycleLR(one, [0.1] * len(one.param_groups), total_steps=8),
    "in turn": lambda one: schedules.SequentialLR(
        one, [schedules.ConstantLR(one, 0.1, 2), schedules.ExponentialLR(one, 0.9)], [3]
    ),
    "chained": lambda one: schedules.ChainedScheduler(
        [schedules.LinearLR(one, 0.5), schedules.MultiplicativeLR(one, lambda _: 0.9)]
    ),
    "plateau": lambda one: schedules.ReduceLROnPlateau(one, patience=0),
}


def trace_of(
    form: str | None, optimizer: str, schedule: str, num_groups: int, is_late: bool, is_reloaded: bool
) -> list[Any]:
    """Train, and note what the schedule has set in each step, and the count of steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 4))
    parameters = list(model.parameters())
    one = OPTIMIZERS[optimizer]([{"params": parameters[n::num_groups]} for n in range(num_groups)])
    narrow = None if form is None else LowPrecisionMoments(model, FORMS[form])
    makers = [lambda: SCHEDULES[schedule](one), lambda: narrow.attach([one]) if narrow is not None else None]
    made = [make() for make in (makers[::-1] if is_late else makers)]
    scheduler, trace = made[1 if is_late else 0], []
    for step in range(8):
        train(one, model, 1)
        scheduler.step(*([1.0] if schedule == "plateau" else []))
        keys = ("lr", "betas", "momentum", "initial_lr", "max_lr", "min_lr")
        trace.append([{key: copy.copy(group[key]) for key in keys if key in group} for group in one.param_groups])
        trace[-1] += [float(state["step"]) for state in one.state.values() if "step" in state]
        if is_reloaded and step == 3:
            one.load_state_dict(copy.deepcopy(one.state_dict()))
    if narrow is not None:
        assert all(isinstance(one.state[p][key], LowBitTensor) for p, key in large(one))
        narrow.let_go()
    return trace


def large(one: torch.optim.Optimizer) -> list[Any]:
    keys = ("exp_avg", "exp_avg_sq", "momentum_buffer")
    return [(p, key) for p, state in one.state.items() for key in keys if key in state and p.numel() >= 4096]


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(
    st.sampled_from(["8bit", "4bit"]),
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_schedules_set_what_they_set_in_a_plain_run(form, optimizer, schedule, num_groups, is_late, is_reloaded):
    options = optimizer, schedule, num_groups, is_late, is_reloaded
    assert trace_of(form, *options) == trace_of(None, *options)


SIZES = (6, 10, 9, 11)  # more than 4096, and no number of whole blocks
ORDERS = {"channels_last": (0, 2, 3, 1), "transposed": (1, 0, 2, 3), "reversed": (3, 2, 1, 0)}  # of dimensions


def in_order(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same values, of whose memory these dimensions are from the outermost to the innermost."""
    return values.permute(order).contiguous().permute([order.index(place) for place in range(4)])


@pytest.mark.parametrize("form", ["bf16", "8bit", "4bit"])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(
    "make", [ADAMW, partial(ADAMW, fused=True), partial(SGD_MOMENTUM, lr=1e-2)], ids=["AdamW", "fused", "SGD"]
)
def test_parameters_in_another_order_of_memory_step_as_the_same_memory_in_order(
    make: Any, order: tuple[int, ...], form: Any
) -> None:
    if form == "bf16" and make.func is torch.optim.SGD:
        pytest.skip("bf16 is for Adam's kind")
    generator = torch.Generator().manual_seed(0)
    values = in_order(torch.randn(SIZES, generator=generator), order)
    ours, twin = nn.Parameter(values.clone()), nn.Parameter(values.permute(order).clone())
    assert not ours.is_contiguous()
    assert twin.is_contiguous()
    optimizers = [make([one]) for one in (ours, twin)]
    narrow = [LowPrecisionMoments(nn.ParameterList([one]), FORMS[form]) for one in (ours, twin)]

    def step() -> None:
        gradient = torch.randn(SIZES, generator=generator)
        ours.grad = gradient if step.is_odd else in_order(gradient, order)  # a user may set any
        twin.grad = gradient.permute(order).contiguous()
        step.is_odd = not step.is_odd
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(ours.permute(order), twin)
        assert ours.stride() == values.stride()

    step.is_odd = False
    for optimizer, one in zip(optimizers, narrow, strict=True):
        one.attach([optimizer])
    for _ in range(4):
        step()
    moments = [value for value in optimizers[0].state[ours].values() if value.dim()]
    assert all(is_low_precision(value) and value.stride() == values.stride() for value in moments)
    saved = copy.deepcopy(optimizers[0].state_dict())
    plain = make([nn.Parameter(values.clone())])
    plain.load_state_dict(torch.load(_saved(saved), weights_only=True))
    for (parameter,) in (group["params"] for group in plain.param_groups):
        found = [value for value in plain.state[parameter].values() if value.dim()]
        assert all(value.dtype == torch.float32 and value.stride() == values.stride() for value in found)
        assert all(torch.equal(value, moment.float()) for value, moment in zip(found, moments, strict=True))
    optimizers[0].load_state_dict(saved)
    for one in narrow:
        one.let_go()
    step()  # with torch's own kernels, of which the fused one goes over memory as it lies


def _saved(state: dict[str, Any]) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def of_many_kinds(*, is_fused: bool) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5000, dtype=torch.float64, generator=generator)
    made = [values.float(), values, values.bfloat16()]
    if not is_fused:  # which torch's kernel refuses, and steps past
        made += [values.to(torch.complex64), torch.stack([values, values], 1).float()[:, 0]]
    return [nn.Parameter(one) for one in made]


@pytest.mark.parametrize("form", ["bf16", "8bit", "4bit"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=["default", "fused", "foreach"])
def test_parameters_of_other_kinds_have_the_moments_that_torch_gives_them(options: Any, form: Any) -> None:
    both = [of_many_kinds(is_fused="fused" in options) for _ in range(2)]
    optimizers = [ADAMW([{"params": one[:2]}, {"params": one[2:], "weight_decay": 0.1}], **options) for one in both]
    narrow = LowPrecisionMoments(nn.ParameterList(both[0]), FORMS[form])
    narrow.attach(optimizers[:1])
    assert narrow.unheld == set(both[0][1:])
    for step in range(4):
        for parameter in itertools.chain(*both):
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1)).mul_(parameter.detach())
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:  # resumed
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        if step == 2:
            narrow.let_go()
    (held, plain), *others = zip(*both, strict=True)
    assert not torch.equal(held, plain)
    for ours, theirs in others:
        assert torch.equal(ours, theirs)
        for key, value in optimizers[1].state[theirs].items():
            assert torch.equal(optimizers[0].state[ours][key], value)
            assert optimizers[0].state[ours][key].dtype == value.dtype
