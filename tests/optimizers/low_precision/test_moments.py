"""Moments in fewer bytes without Lightning: their bytes, schedules, and FSDP2."""

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_optimizer import Lion
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lightning_vram
from lightning_vram import track_memory
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.optimizers.moment_forms import FORMS, KINDS, UpdateCheck, is_low_precision
from lightning_vram.private_names.fsdp2 import local_shard

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def state_bytes(form: str, make: Any = torch.optim.AdamW, sizes: Any = (64, 128, 64)) -> int:
    """Tracked bytes of states after two steps, without counts of steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))
    optimizer = make(model.parameters(), lr=1e-3)
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
    sizes = (512, 512)
    count = 512 * 512 + 512
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


SIZES = (6, 10, 9, 11)  # more than 4096, and no number of whole blocks
ORDERS = {"channels_last": (0, 2, 3, 1), "reversed": (3, 2, 1, 0)}  # of dimensions


def in_order(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same values, of whose memory these dimensions are from the outermost to the innermost."""
    return values.permute(order).contiguous().permute([order.index(place) for place in range(4)])


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (ADAMW, "bf16"),
        (ADAMW, "8bit"),
        (partial(ADAMW, fused=True), "bf16"),
        (partial(ADAMW, fused=True), "4bit"),
        (partial(SGD_MOMENTUM, lr=1e-2), "8bit"),
    ],
    ids=["AdamW-bf16", "AdamW-8bit", "fused-bf16", "fused-4bit", "SGD-8bit"],
)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_parameters_in_another_order_of_memory_step_as_the_same_memory_in_order(
    make: Any, order: tuple[int, ...], form: Any
) -> None:
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
    optimizers[0].load_state_dict(saved)
    for one in narrow:
        one.let_go()
    step()  # with torch's own kernels, of which the fused one goes over memory as it lies


def of_many_kinds(*, is_fused: bool) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5000, dtype=torch.float64, generator=generator)
    made = [values.float(), values, values.bfloat16()]
    if not is_fused:  # which torch's kernel refuses, and steps past
        made += [values.to(torch.complex64), torch.stack([values, values], 1).float()[:, 0]]
    return [nn.Parameter(one) for one in made]


@pytest.mark.parametrize("form", ["bf16", "8bit"])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["default", "fused"])
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


def test_what_is_below_half_a_distance_is_counted_as_lost() -> None:
    weights = nn.ParameterList([nn.Parameter(torch.zeros(32, 128))])
    is_due, optimizer = [True], torch.optim.SGD(weights, lr=1.0, momentum=1.0)
    check = UpdateCheck(lambda: is_due[0])
    LowPrecisionMoments(weights, FORMS["8bit"], check=check).attach([optimizer])
    assert check.share is None
    # In a block whose largest number is 1 the next ones are (127 / 128)^2, 0.0156 below, and so on.
    moved = torch.cat([torch.zeros(1), torch.full((63,), -1e-3), torch.full((64,), -0.5)]).expand(32, 128)
    for gradient in (torch.ones(32, 128), moved):
        check.begin()
        weights[0].grad = gradient.clone()
        optimizer.step()
    assert float(check.share) == torch.tensor(63 / 127)
    is_due[0] = False
    check.begin()
    optimizer.step()
    assert check.share is None
