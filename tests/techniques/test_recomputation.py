"""What changes between forward and backward: whatever recomputes gives the gradients of the baseline, or an error.

Blocks end in a weight that starts at zero, so that outputs tell nothing of what a block computes in the first step.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoint_nets import run_ranks, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from lightning_vram.core.recomputed_saves import RecomputationError
from lightning_vram.techniques.activation_checkpointing.apply import (
    BudgetedCheckpointing,
    apply_activation_checkpointing,
)
from lightning_vram.techniques.activation_checkpointing.budget_plan import CheckpointPlan
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.token_tiling import apply_token_tiling

WIDTH, INNER, TOKENS, NUM_BLOCKS = 8, 16, 48, 4
LARGE = 64 * 1024 // 4 + INNER  # elements of a tensor that is too large to be copied in each call
SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)
GLOBAL = {"scale": 1.0}


class Block(nn.Module):
    """A residual MLP whose branch starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.inner(self.up(x))))

    def inner(self, hidden: Tensor) -> Tensor:
        return hidden


class Modes(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return hidden if self.training else 0.3 * hidden


class Adapters(Block):
    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({name: nn.Linear(INNER, INNER) for name in "pq"})
        self.active = "p"

    def inner(self, hidden: Tensor) -> Tensor:
        return self.adapters[self.active](hidden)


class Attribute(Block):
    """Reads a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.ones(INNER)

    def inner(self, hidden: Tensor) -> Tensor:
        return hidden + self.gain[:INNER]  # saves neither


class Buffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(INNER))

    def inner(self, hidden: Tensor) -> Tensor:
        return hidden + self.gain[:INNER]  # saves neither


class Memory(Buffer):
    """Writes its buffer in each forward, and others write it afterwards."""

    def inner(self, hidden: Tensor) -> Tensor:
        self.gain.mul_(0.9)
        return super().inner(hidden)


class Object(Block):
    """Reads an object of a class of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.options = type("Options", (), {"scale": 1.0})()

    def inner(self, hidden: Tensor) -> Tensor:
        return hidden * self.options.scale


class Global(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return hidden * GLOBAL["scale"]


class Context(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return hidden * SCALE.get()


class Aux(Block):
    """Adds a loss in place to a tensor of its own, which needs a gradient from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = torch.zeros(())

    def inner(self, hidden: Tensor) -> Tensor:
        self.aux += hidden.square().mean()
        return hidden


class MaxNorm(Block):
    """Writes a parameter in its forward, which autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, INNER, max_norm=1.0)
        self.log_scale = nn.Parameter(torch.ones(()))

    def inner(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.log_scale.clamp_(0, 0.5)
        return hidden * self.log_scale.exp() + self.table(torch.arange(TOKENS) % 4)


class Constants(Block):
    """Makes a tensor of the default dtype, on the default device."""

    def inner(self, hidden: Tensor) -> Tensor:
        ramp = torch.arange(1.0, INNER + 1)
        return hidden * ramp.to(hidden.dtype) / ramp.dtype.itemsize


class DefaultDevice(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return hidden * (0.5 if torch.get_default_device().type == "meta" else 1.0)


class Flags(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return hidden * (0.5 if torch.are_deterministic_algorithms_enabled() else 1.0)


class Attention(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        heads = hidden.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


class Statistics(Block):
    """Reads the running statistics of its own norm while it trains, as quantization of folded norms does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(INNER, momentum=1e-3)

    def inner(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden.movedim(-1, 1)).movedim(1, -1)
        return normed * torch.sigmoid(self.norm.running_var + self.norm.running_mean)


class Random(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, 0.5)


class HostRandom(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return hidden * (random.random() + np.random.random())


class Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Identity()

    def inner(self, hidden: Tensor) -> Tensor:
        return self.act(hidden)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def scaled(value: float) -> Iterator[None]:
    token = SCALE.set(value)
    try:
        yield
    finally:
        SCALE.reset(token)


@contextmanager
def hooked(net: nn.Module) -> Iterator[None]:
    handles = [block.act.register_forward_hook(lambda module, args, output: 3 * output) for block in net]
    yield
    for handle in handles:
        handle.remove()


def each(change: Callable[[Any], object]) -> Callable[[nn.Sequential], None]:
    """Apply ``change`` to each block."""

    def apply(net: nn.Sequential) -> None:
        with torch.no_grad():
            for block in net:
                change(block)

    return apply


def set_to(**values: Any) -> Callable[[nn.Sequential], None]:
    """Set attributes of each block; what can be called makes a value."""

    def change(block: nn.Module) -> None:
        for name, value in values.items():
            setattr(block, name, value() if callable(value) else value)

    return each(change)


def conditions(net: nn.Sequential) -> None:
    """Give each block a view of one tensor that needs a gradient."""
    for block, part in zip(
        net, (net[0].up.weight.sum() * torch.ones(NUM_BLOCKS * INNER)).chunk(NUM_BLOCKS), strict=True
    ):
        block.gain = part


@dataclass(frozen=True)
class Row:
    """What happens in a step."""

    make_block: Callable[[], Block]
    before: Callable[[nn.Sequential], object] = lambda net: None  # the forward
    between: Callable[[nn.Sequential], object] = lambda net: None  # forward and backward
    scope: Callable[[nn.Sequential], AbstractContextManager[Any]] = lambda net: nullcontext()  # of the forward
    num_calls: int = 1  # of the blocks in a step
    error: str | None = None  # what it says; None: gradients are equal


WRITTEN = "modified by an inplace operation"
DIFFERS = "diverged from the forward: .* Gradients would be wrong"
ROWS = {
    "nothing": Row(Block),
    "training mode": Row(Modes, nn.Module.train, nn.Module.eval),
    "a name": Row(Adapters, set_to(active="p"), set_to(active="q")),
    "a tensor is replaced": Row(
        Attribute, set_to(gain=lambda: torch.ones(INNER)), set_to(gain=lambda: torch.zeros(INNER))
    ),
    "a tensor is written": Row(
        Attribute, set_to(gain=lambda: torch.ones(INNER)), each(lambda block: block.gain.zero_())
    ),
    "a large tensor is written": Row(
        Attribute, set_to(gain=lambda: torch.ones(LARGE)), each(lambda block: block.gain.zero_()), error=WRITTEN
    ),
    "a view is replaced": Row(
        Attribute,
        set_to(gain=lambda: torch.ones(2 * INNER)[:INNER]),
        set_to(gain=lambda: torch.zeros(2 * INNER)[:INNER]),
    ),
    "a condition with a gradient": Row(Attribute, conditions, set_to(gain=lambda: torch.zeros(INNER))),
    "a buffer is written": Row(Buffer, each(lambda block: block.gain.fill_(1)), each(lambda block: block.gain.zero_())),
    "a buffer that the block writes": Row(Memory, between=each(lambda block: block.gain.mul_(0.5))),
    "losses are added up in an attribute": Row(Aux, set_to(aux=lambda: torch.zeros(())), num_calls=2),
    "weights that the block itself writes": Row(MaxNorm, num_calls=2),
    "weights of another adapter": Row(
        Adapters, set_to(active="p"), each(lambda block: block.adapters["q"].weight.mul_(0.5))
    ),
    "statistics that the block reads": Row(Statistics),
    "weights": Row(Block, between=each(lambda block: block.down.weight.add_(1)), error=WRITTEN),
    "weights are frozen": Row(Block, nn.Module.requires_grad_, lambda net: net.requires_grad_(False)),
    "a layer is replaced": Row(Block, between=set_to(up=lambda: nn.Linear(WIDTH, INNER))),
    "hooks": Row(Hooked, scope=hooked),
    "an object": Row(
        Object,
        each(lambda block: setattr(block.options, "scale", 1.0)),
        each(lambda block: setattr(block.options, "scale", 0.3)),
        error=DIFFERS,
    ),
    "a global": Row(Global, lambda net: GLOBAL.update(scale=1.0), lambda net: GLOBAL.update(scale=0.3), error=DIFFERS),
    "a context variable": Row(Context, scope=lambda net: scaled(0.3)),
    "random numbers": Row(Random, between=lambda net: torch.rand(3)),
    "random numbers of the host": Row(HostRandom, between=lambda net: (random.random(), np.random.random())),
    "default dtype": Row(Constants, scope=lambda net: default_dtype()),
    "default device": Row(DefaultDevice, scope=lambda net: torch.device("meta")),
    "deterministic algorithms": Row(Flags, scope=lambda net: deterministic()),
    "backends of attention": Row(Attention, scope=lambda net: sdpa_kernel(SDPBackend.MATH)),
    "autocast": Row(Block, scope=lambda net: torch.autocast("cpu", torch.bfloat16)),
}


def checkpoint(net: nn.Module, **arguments: Any) -> None:
    apply_activation_checkpointing(net, layers=type(net[0]).__name__, **arguments)


def checkpoint_in_budget(net: nn.Module) -> None:
    """Apply the plan that needs the least memory, made from a step on the side."""
    handle = apply_activation_checkpointing(net, layers=type(net[0]).__name__)
    state = {name: one.clone() for name, one in net.state_dict().items()}

    def plan_for(budget_bytes: int) -> tuple[BudgetedCheckpointing, CheckpointPlan]:
        budgeted = BudgetedCheckpointing(net, handle, budget_bytes)
        with budgeted.observing():
            net(torch.randn(2, TOKENS, WIDTH)).sum()
        return budgeted, budgeted.plan()

    budgeted, plan = plan_for(plan_for(1 << 30)[1].minimum_bytes + 1024)
    assert any(numbers is not None for numbers in plan.decisions.values())
    budgeted.apply(plan.decisions)
    net.load_state_dict(state)


HOW = {
    "checkpointing": checkpoint,
    "a budget": checkpoint_in_budget,
    "matmuls": lambda net: checkpoint(net, save=SavePolicy("matmuls")),
    "segments": lambda net: apply_activation_checkpointing(net, segments=2),
    "tiling": lambda net: apply_token_tiling(net, type(net[0]).__name__, 16),
}


def train(
    row: Row,
    recompute: Callable[[nn.Module], object] | None,
    num_steps: int = 3,
    wrap: Callable[[nn.Module], nn.Module] = lambda net: net,
) -> list[Tensor]:
    """Return the gradients of all steps."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    net = nn.Sequential(*(row.make_block() for _ in range(NUM_BLOCKS)))
    if recompute is not None:
        row.before(net)
        recompute(net)
    model = wrap(net)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    found: list[Tensor] = []
    for _ in range(num_steps):
        row.before(net)
        x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
        target = torch.randn(2, TOKENS, WIDTH)
        with row.scope(net):
            output = x
            for _ in range(row.num_calls):
                output = model(output)
        row.between(net)
        F.mse_loss(output.float(), target).backward()
        row.before(net)
        with torch.no_grad():
            found += [x.grad, *(whole(p.grad).clone() for p in net.parameters() if p.grad is not None)]
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.5 * parameter.grad
                    parameter.grad = None
    return found


VARIANTS = ["a budget", "matmuls", "segments"]
IN_VARIANTS = ["training mode", "a tensor is written", "a buffer that the block writes", "weights", "an object"]


@pytest.mark.quick_sample(24)
@pytest.mark.parametrize(
    ("name", "how"),
    [*product(ROWS, ["checkpointing", "tiling"]), *product(IN_VARIANTS, VARIANTS), ("random numbers", "matmuls")],
)
def test_gradients_are_the_baselines_or_there_is_an_error(name, how):
    row = ROWS[name]
    if (name, how) == ("weights of another adapter", "tiling"):  # the node of the tiles has all weights of a module
        row = replace(row, error=WRITTEN)
    if row.error is not None:
        with pytest.raises((RuntimeError, RecomputationError), match=row.error):
            train(row, HOW[how])
        return
    expected, found = train(row, None), train(row, HOW[how])
    if (name, how) == ("random numbers", "tiling"):  # draws for each tile by itself
        expected, found = train(replace(row, between=lambda net: None), HOW[how], 1), train(row, HOW[how], 1)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if how == "tiling":
            size = float(other.abs().max()) if name == "autocast" else 1e-3
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-2 * size)
        else:
            assert torch.equal(one, other)


def shard(net: nn.Sequential) -> nn.Module:
    for block in net:
        fully_shard(block)
    return fully_shard(net)


WRAPS = {"DDP": DistributedDataParallel, "FSDP2": shard}


def compare_on_rank(folder: Path, name: str, how: str, wrap: str) -> None:
    expected, found = (train(ROWS[name], one, wrap=WRAPS[wrap]) for one in (None, HOW[how]))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if how != "tiling" else torch.allclose(one, other, 1e-4, 1e-5)


@pytest.mark.distributed
@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("how", ["checkpointing", "tiling"])
@pytest.mark.parametrize("name", ["a view is replaced", "a context variable"])
def test_on_two_ranks_gradients_are_the_baselines(name, how, wrap, tmp_path):
    run_ranks(2, compare_on_rank, tmp_path, name, how, wrap)


class Outer(nn.Module):
    """Holds a block that is recomputed by itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Global()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.block(x))


@pytest.mark.parametrize("recompute", [apply_activation_checkpointing, apply_token_tiling])
@pytest.mark.parametrize("step", [1, 3, 4])
def test_inside_of_a_checkpoint_forwards_1_and_4_are_compared_and_3_is_not(recompute, step):
    """The recomputations of the outer layer call the inner one as well."""
    net = nn.ModuleList([Outer()])
    recompute(net, layers="Global", **({"tile": 16} if recompute is apply_token_tiling else {}))
    apply_activation_checkpointing(net, layers="Outer", determinism_check="none")
    for number in range(1, step + 1):
        GLOBAL["scale"] = 1.0
        loss = net[0](torch.randn(2, TOKENS, WIDTH, requires_grad=True)).square().sum()
        GLOBAL["scale"] = 0.3 if number == step else 1.0
        with pytest.raises(RecomputationError, match=DIFFERS) if number == step != 3 else nullcontext():
            loss.backward()
