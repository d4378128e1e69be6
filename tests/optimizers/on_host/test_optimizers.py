"""Optimizers that step beside the training: the bits of a plain run, and nobody who reads what is not yet written."""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from support.helpers import PlantedError
from support.sharded_nets import (
    MODES,
    WIDTH,
    Net,
    assert_same,
    batch,
    gradients,
    hosted,
    like_shard,
    loss_of,
    make,
    on_ranks,
    part,
    sharded,
    take_step,
    weights,
    whole,
)
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from lightning_vram.core.host.transfers import Ticket
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.optimizers.step_round import owner_of
from lightning_vram.techniques.sharding import can_recover, discard_failed_iteration

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
PATIENCE = 10  # seconds, of tests that would hang
HOST_MODES = [mode for mode in MODES if mode != "none"]
# What optimizers do in five steps, and the kernel that is chosen on the host, is in optimizer_table.txt.


def adamw(net: nn.Module, **options: Any) -> Optimizer:
    return optim.AdamW(net.parameters(), **{"lr": 1e-2, "fused": True, **options})


def states(net: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{name} {key}": whole(value).clone()
        for name, parameter in net.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


@contextmanager
def both(
    mode: str = "params",
    build: Callable[..., Any] = adamw,
    kind: Callable[[], nn.Module] = Net,
    *,
    is_early: bool = False,
    **options: Any,
) -> Iterator[Any]:
    """A hosted run and a plain one, each a network and its optimizer, which end with the same weights and gradients."""
    net, plain = make(kind), make(kind)
    with hosted(net, mode, **options) as host:
        host.may_step_early = lambda optimizer: is_early
        built = build(net)
        host.attach(built if isinstance(built, list) else [built])
        yield host, (net, built), (plain, build(plain))
        assert_same(weights(net), weights(plain))
    assert_same(weights(net), weights(plain))
    assert_same(gradients(net), gradients(plain))


def step_by_closure(net: nn.Module, optimizer: Optimizer, seed: int) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, batch(seed))
        loss.backward()
        return loss.detach()

    return optimizer.step(closure)


# --- the same result ---


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_training_goes_as_the_plain_one_in_every_mode(mesh, mode, is_early):
    with both(mode, is_early=is_early, reshard_after_forward=not is_early) as (_, ours, theirs):
        for seed in range(4):
            assert torch.equal(step_by_closure(*ours, seed), step_by_closure(*theirs, seed))
            with torch.no_grad():  # also of what stayed gathered
                assert torch.equal(ours[0](batch(9)), theirs[0](batch(9)))


@pytest.mark.parametrize("mode", ["params", "optimizer apart"])
def test_gradients_of_several_backwards_add_up(mesh, mode):
    with both(mode) as (_, *pairs):
        for seed in range(0, 6, 3):
            for net, optimizer in pairs:
                optimizer.zero_grad()
                for offset in range(3):
                    (loss_of(net, batch(seed + offset)) / 3).backward()
                optimizer.step()


def test_two_optimizers_may_have_a_part_each_or_all(mesh):
    def build(net: Any) -> list[Optimizer]:
        return [
            optim.AdamW(net.blocks.parameters(), lr=1e-2, fused=True),
            optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9, fused=True),
            optim.Adam(net.parameters(), lr=1e-3, fused=True),
        ]

    with both(build=build) as (_, *pairs):
        for net, optimizers in pairs:
            for seed in range(3):
                net.zero_grad()
                loss_of(net, batch(seed)).backward()
                for optimizer in optimizers:  # two in a row on the same parameters
                    optimizer.step()


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [(lambda one: StepLR(one, 1, 0.5), 1e-2), (lambda one: OneCycleLR(one, 0.1, total_steps=9), torch.tensor(1e-2))],
)
def test_schedules_change_the_rate_of_the_next_step(mesh, schedule, rate):
    with both(build=lambda net: adamw(net, lr=copy.deepcopy(rate))) as (_, *pairs), warnings.catch_warnings():
        warnings.simplefilter("error")  # as where it believes that it is called before the optimizer
        for pair in pairs:
            scheduler = schedule(pair[1])
            for seed in range(4):
                take_step(*pair, seed)
                scheduler.step()


@pytest.mark.parametrize("mode", ["params", "half apart"])
def test_an_optimizer_that_is_made_in_the_midst_is_taken_in(mesh, mode):
    with both(mode) as (_, *pairs):
        for net, _ in pairs:
            for lr in (1e-2, 1e-3):
                optimizer = adamw(net, lr=lr)
                for seed in range(2):
                    take_step(net, optimizer, seed)


# --- while a step is under way ---


class Gate:
    """Holds the steps up until somebody waits for one."""

    def __init__(self, host: HostOptimizers, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.is_waited_for = False
        wait = Ticket.wait

        def open_and_wait(ticket: Ticket) -> None:
            self.is_waited_for = True
            self._open.set()
            wait(ticket)

        host._worker.submit(lambda: self._open.wait(PATIENCE))
        monkeypatch.setattr(Ticket, "wait", open_and_wait)


READS: dict[str, Callable[[Any, Optimizer], dict[str, Tensor]]] = {
    "weights": lambda net, optimizer: weights(net),
    "data": lambda net, optimizer: {n: whole(p.data).clone() for n, p in net.named_parameters()},
    "state dict": lambda net, optimizer: {n: whole(v) for n, v in net.state_dict().items()},
    "forward": lambda net, optimizer: {"": net(batch(1)).detach()},
    "states": states,
    "state dict of the optimizer": lambda net, optimizer: {
        f"{i} {key}": whole(value)
        for i, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    },
    "one parameter": lambda net, optimizer: {"": whole(net.head.bias).detach()},
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("mode", ["params", "optimizer apart", "half apart"])
def test_who_reads_what_a_step_writes_gets_what_it_has_written(mesh, mode, read, monkeypatch):
    with both(mode) as (host, ours, theirs):
        for net, optimizer in (ours, theirs):
            take_step(net, optimizer)
            optimizer.zero_grad()
            loss_of(net, batch(1)).backward()
        gate = Gate(host, monkeypatch)
        ours[1].step()
        assert not gate.is_waited_for  # by the step itself
        theirs[1].step()
        assert_same(read(*ours), read(*theirs))
        assert gate.is_waited_for


@pytest.mark.parametrize(
    "clear",
    [
        lambda net: net.zero_grad(),
        lambda net: net.zero_grad(set_to_none=False),
        lambda net: [parameter.grad.mul_(100) for parameter in net.parameters()],
    ],
    ids=["none", "zero", "changed"],
)
@pytest.mark.parametrize("mode", HOST_MODES)
def test_gradients_that_are_cleared_or_changed_after_a_step_do_not_change_it(mesh, mode, clear, monkeypatch):
    with both(mode) as (host, *pairs):
        for net, optimizer in pairs:
            take_step(net, optimizer)
            optimizer.zero_grad()
            loss_of(net, batch(1)).backward()
        Gate(host, monkeypatch)
        for net, optimizer in pairs:
            optimizer.step()
            clear(net)


@pytest.mark.parametrize("mode", HOST_MODES)
def test_weights_that_are_written_after_a_step_stay(mesh, mode, monkeypatch):
    net, values = make(), make(seed=1)
    with hosted(net, mode) as host:
        optimizer = adamw(net)
        host.attach([optimizer])
        take_step(net, optimizer)
        loss_of(net, batch(1)).backward()
        shards = dict(net.named_parameters())
        Gate(host, monkeypatch)
        optimizer.step()
        with torch.no_grad():
            for name, value in values.named_parameters():
                shards[name].copy_(like_shard(value.detach(), shards[name]))
        assert_same(weights(net), weights(values))
        assert torch.equal(net(batch(1)), values(batch(1)))


def test_an_error_of_a_step_reaches_whoever_comes_next(mesh, monkeypatch):
    def fail(*args: Any) -> None:
        raise PlantedError

    monkeypatch.setattr("lightning_vram.optimizers.on_host.StoredStates.step", fail)
    net, heard = make(), []
    with suppress(PlantedError), sharded(net) as sharding:  # nor can the module be made whole
        host = HostOptimizers(sharding, num_threads=1)
        optimizer = adamw(net)
        host.attach([optimizer])
        loss_of(net, batch(0)).backward()
        with suppress(PlantedError):  # if the thread is that fast
            optimizer.step()
        for call in (host.finish, optimizer.step):
            with pytest.raises(PlantedError):
                call()
            heard.append(call)
        host.let_go({})
    assert len(heard) == 2


# --- steps in the backward ---


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blocks[0](x))


@pytest.mark.parametrize("mode", HOST_MODES)
def test_a_layer_that_is_called_twice_is_stepped_with_both_gradients(mesh, mode):
    with both(mode, kind=Twice, is_early=True) as (_, *pairs):
        for seed in range(3):
            for pair in pairs:
                step_by_closure(*pair, seed)


@pytest.mark.skipif(not can_recover(), reason="needs torch 2.13")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_a_failed_iteration_training_goes_on_as_if_it_had_not_been(mesh, mode, where):
    with both(mode) as (_, ours, theirs):
        for seed in range(2):
            with pytest.raises(PlantedError):
                fail_in(ours[0], where)
            discard_failed_iteration(ours[0])
            take_step(*ours, seed)
            take_step(*theirs, seed)


def fail_in(net: Any, where: str) -> None:
    def fail(*args: Any) -> None:
        raise PlantedError

    def fail_later(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = net.blocks[1].up.register_forward_hook(fail if where == "forward" else fail_later)
    try:
        loss_of(net, batch(7)).backward()
    finally:
        handle.remove()


# --- what optimizers are used for besides ---


@pytest.mark.parametrize("mode", ["params", "optimizer apart", "half apart"])
def test_a_state_dict_can_be_loaded_into_another_optimizer(mesh, mode):
    with both(mode) as (host, ours, theirs):
        take_step(*ours)
        take_step(*theirs)
        second = adamw(ours[0], lr=1.0)
        host.attach([second])
        second.load_state_dict(ours[1].state_dict())
        for seed in (1, 2):
            take_step(ours[0], second, seed)
            take_step(*theirs, seed)
        assert_same(states(ours[0], second), states(*theirs))


def test_hooks_of_steps_are_called_once_and_may_change_gradients(mesh):
    calls: list[str] = []
    with both() as (_, ours, theirs):
        for _, optimizer in (ours, theirs):
            optimizer.register_step_pre_hook(
                lambda some, *args: [p.grad.mul_(-1) for group in some.param_groups for p in group["params"]] and None
            )
        ours[1].register_step_pre_hook(lambda some, *args: calls.append(f"before {some is ours[1]}"))
        ours[1].register_step_post_hook(lambda some, *args: calls.append(f"after {some is ours[1]}"))
        for seed in range(2):
            take_step(*ours, seed)
            take_step(*theirs, seed)
    assert calls == ["before True", "after True"] * 2


def test_a_scaler_unscales_and_leaves_steps_out(mesh):
    with both() as (_, *pairs):
        for net, optimizer in pairs:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            for seed in range(4):
                optimizer.zero_grad()
                scaler.scale(loss_of(net, batch(seed) * (float("inf") if seed == 1 else 1))).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize(
    ("mode", "may_wait"), [*((mode, True) for mode in MODES), ("params", False), ("half apart", False)]
)
def test_norms_are_clipped_as_pytorch_does_it(mesh, mode, may_wait):
    with both(mode) as (host, (net, optimizer), (plain, reference)):
        for seed in range(3):
            for each in (net, plain):
                each.zero_grad()
                loss_of(each, batch(seed)).backward()
            host.clip_norm(optimizer, 0.1, may_wait=may_wait)
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            if not may_wait:
                assert_same(gradients(net), gradients(plain))
            optimizer.step()
            reference.step()


def test_let_go_the_optimizer_is_what_it_was(mesh):
    net = make()
    with hosted(net) as host:
        optimizer = adamw(net)
        host.attach([optimizer, optimizer])
        host.attach([optimizer])
        take_step(net, optimizer)
        worker = host._worker
    assert not worker._thread.is_alive()
    assert owner_of(optimizer) is None
    assert not optimizer._optimizer_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in net.parameters()]
    assert {id(p) for p in optimizer.state} == {id(p) for p in net.parameters()}
    assert not any(isinstance(v, DTensor) for state in optimizer.state.values() for v in state.values())


# --- two ranks ---


class Experts(nn.Module):
    """Three layers of which one is used; it is gathered as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[self.chosen](x)


class Either(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def choose(self, index: int) -> None:
        self.blocks[0].chosen = self.blocks[1].chosen = index


def leave_out_on_two() -> None:
    rank = torch.distributed.get_rank()
    for mode in MODES:
        for is_early in (False, True):
            net, plain = make(Either), make(Either)
            options = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.5}
            reference = adamw(plain, **options)
            with hosted(net, mode) as host:
                host.may_step_early = lambda optimizer, is_early=is_early: is_early
                optimizer = adamw(net, **options)
                host.attach([optimizer])
                for seed, sides in enumerate([(0, 1), (1, 1), (2, 0)]):

                    def closure(net: Any = net, seed: int = seed, side: int = sides[rank]) -> None:
                        net.zero_grad()
                        net.choose(side)
                        loss_of(net, part(batch(seed))).backward()

                    optimizer.step(closure)
                    reference.zero_grad()
                    for side, half in zip(sides, batch(seed).chunk(2), strict=True):
                        plain.choose(side)
                        (loss_of(plain, half) / 2).backward()
                    reference.step()
                    assert_same(gradients(net), gradients(plain), 1e-5)
                    assert_same(weights(net), weights(plain), 1e-5)


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path):
    on_ranks(tmp_path, leave_out_on_two)
