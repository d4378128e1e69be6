"""Optimizers that step beside the training: the bits of a plain run, and nobody who reads what is not yet written."""

import copy
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
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
Make = Callable[[Any], Optimizer]

# Of our optimizer and of the baseline, which has to name the kernel that ours chooses on the host. Five steps of all
# others are in optimizer_table.txt.
EXACT: dict[str, tuple[Make, Make]] = {
    "Adam amsgrad": (partial(optim.Adam, amsgrad=True), partial(optim.Adam, amsgrad=True, fused=True)),
    "AdamW foreach": (partial(optim.AdamW, foreach=True), partial(optim.AdamW, foreach=True)),
    "Adagrad in a loop": (partial(optim.Adagrad, foreach=False), partial(optim.Adagrad, foreach=False)),
    "Adafactor": (optim.Adafactor, optim.Adafactor),
}


def adamw(net: nn.Module, **options: Any) -> Optimizer:
    return optim.AdamW(net.parameters(), **{"lr": 1e-2, **options})


def plain_adamw(net: nn.Module, **options: Any) -> Optimizer:
    return adamw(net, fused=True, **options)


def states(net: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{name} {key}": whole(value).clone()
        for name, parameter in net.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


# --- the same result ---


@pytest.mark.parametrize("name", EXACT)
def test_an_optimizer_has_the_bits_of_the_plain_run_during_and_after(mesh, name):
    ours, theirs = EXACT[name]
    net, plain = make(), make()
    reference = theirs(plain.parameters())
    with hosted(net, "optimizer") as host:
        optimizer = ours(net.parameters())
        host.attach([optimizer])
        for seed in range(3):
            assert torch.equal(take_step(net, optimizer, seed), take_step(plain, reference, seed))
        assert_same(weights(net), weights(plain))
        assert_same(states(net, optimizer), states(plain, reference))
    assert_same(weights(net), weights(plain))
    assert_same(states(net, optimizer), states(plain, reference))
    for seed in range(3, 5):  # plainly from here
        take_step(net, optimizer, seed)
        take_step(plain, reference, seed)
    if name != "Adam amsgrad":  # now by the kernel that PyTorch chooses
        assert_same(weights(net), weights(plain))


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_training_goes_as_the_plain_one_in_every_mode(mesh, mode, is_early):
    net, plain = make(), make()
    reference = plain_adamw(plain)
    with hosted(net, mode) as host:
        host.may_step_early = lambda optimizer: is_early
        optimizer = adamw(net, fused=True)
        host.attach([optimizer])
        for seed in range(4):
            assert torch.equal(step_by_closure(net, optimizer, seed), step_by_closure(plain, reference, seed))
            with torch.no_grad():  # also of what stayed gathered
                assert torch.equal(net(batch(9)), plain(batch(9)))
    assert_same(weights(net), weights(plain))
    assert_same(gradients(net), gradients(plain))


def step_by_closure(net: nn.Module, optimizer: Optimizer, seed: int) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, batch(seed))
        loss.backward()
        return loss.detach()

    return optimizer.step(closure)


@pytest.mark.parametrize("mode", ["params", "optimizer apart"])
def test_gradients_of_several_backwards_add_up(mesh, mode):
    net, plain = make(), make()
    reference = plain_adamw(plain)
    with hosted(net, mode) as host:
        optimizer = adamw(net)
        host.attach([optimizer])
        for seed in range(0, 6, 3):
            for each, some in ((net, optimizer), (plain, reference)):
                for offset in range(3):
                    (loss_of(each, batch(seed + offset)) / 3).backward()
                some.step()
                some.zero_grad()
        assert_same(weights(net), weights(plain))


def test_two_optimizers_may_have_a_part_each_or_all(mesh):
    def run(net: nn.Module, one: Optimizer, two: Optimizer, three: Optimizer) -> None:
        for seed in range(3):
            loss_of(net, batch(seed)).backward()
            for optimizer in (one, two, three):  # two and three in a row on the same parameters
                optimizer.step()
            for optimizer in (one, two, three):
                optimizer.zero_grad()

    def build(net: Any, **options: Any) -> list[Optimizer]:
        return [
            optim.AdamW(net.blocks.parameters(), lr=1e-2, **options),
            optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9, **options),
            optim.Adam(net.parameters(), lr=1e-3, **options),
        ]

    net, plain = make(), make()
    with hosted(net) as host:
        optimizers = build(net)
        host.attach(optimizers)
        run(net, *optimizers)
        run(plain, *build(plain, fused=True))
        assert_same(weights(net), weights(plain))


@pytest.mark.parametrize("rate", [1e-2, torch.tensor(1e-2)])
@pytest.mark.parametrize("schedule", [lambda o: StepLR(o, 1, 0.5), lambda o: OneCycleLR(o, 0.1, total_steps=9)])
def test_schedules_change_the_rate_of_the_next_step(mesh, schedule, rate):
    net, plain = make(), make()
    reference = plain_adamw(plain, lr=copy.deepcopy(rate))
    with hosted(net) as host:
        optimizer = adamw(net, lr=copy.deepcopy(rate))
        host.attach([optimizer])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # as where it believes that it is called before the optimizer
            schedules = schedule(optimizer), schedule(reference)
            for seed in range(4):
                take_step(net, optimizer, seed)
                take_step(plain, reference, seed)
                for each in schedules:
                    each.step()
        assert_same(weights(net), weights(plain))
        assert copy.deepcopy(optimizer.param_groups[0]["lr"]) == reference.param_groups[0]["lr"]


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_is_made_in_the_midst_is_taken_in(mesh, mode):
    net, plain = make(), make()
    with hosted(net, mode):
        for lr in (1e-2, 1e-3):
            optimizer, reference = adamw(net, lr=lr), plain_adamw(plain, lr=lr)
            for seed in range(2):
                take_step(net, optimizer, seed)
                take_step(plain, reference, seed)
        assert_same(weights(net), weights(plain))


@pytest.mark.parametrize("kind", [optim.LBFGS, optim.SparseAdam])
def test_what_cannot_step_is_refused_and_nothing_else_attached(mesh, kind):
    net = make()
    with hosted(net) as host:
        good = adamw(net)
        with pytest.raises(ValueError, match=rf"^{kind.__name__} cannot step on shards: "):
            host.attach([good, kind(list(net.parameters()))])
        assert owner_of(good) is None


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
@pytest.mark.parametrize("mode", HOST_MODES)
def test_who_reads_what_a_step_writes_gets_what_it_has_written(mesh, mode, read, monkeypatch):
    net, plain = make(), make()
    reference = plain_adamw(plain)
    with hosted(net, mode) as host:
        optimizer = adamw(net)
        host.attach([optimizer])
        for each, some in ((net, optimizer), (plain, reference)):
            take_step(each, some)
            some.zero_grad()
            loss_of(each, batch(1)).backward()
        gate = Gate(host, monkeypatch)
        optimizer.step()
        assert not gate.is_waited_for  # by the step itself
        reference.step()
        assert_same(read(net, optimizer), read(plain, reference))
        assert gate.is_waited_for


@pytest.mark.parametrize("mode", HOST_MODES)
def test_gradients_that_are_cleared_or_changed_after_a_step_do_not_change_it(mesh, mode, monkeypatch):
    for clear in (
        lambda net: net.zero_grad(),
        lambda net: net.zero_grad(set_to_none=False),
        lambda net: [p.grad.mul_(100) for p in net.parameters()],
    ):
        net, plain = make(), make()
        reference = plain_adamw(plain)
        with hosted(net, mode) as host, monkeypatch.context() as patch:
            optimizer = adamw(net)
            host.attach([optimizer])
            for each, some in ((net, optimizer), (plain, reference)):
                take_step(each, some)
                some.zero_grad()
                loss_of(each, batch(1)).backward()
            Gate(host, patch)
            for each, some in ((net, optimizer), (plain, reference)):
                some.step()
                clear(each)
            assert_same(weights(net), weights(plain))
            assert_same(gradients(net), gradients(plain))


def test_weights_that_are_written_after_a_step_stay(mesh, monkeypatch):
    for mode in HOST_MODES:
        net = make()
        values = make(seed=1)
        with hosted(net, mode) as host, monkeypatch.context() as patch:
            optimizer = adamw(net)
            host.attach([optimizer])
            take_step(net, optimizer)
            loss_of(net, batch(1)).backward()
            shards = dict(net.named_parameters())
            Gate(host, patch)
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
    net = make()
    with suppress(PlantedError), sharded(net) as sharding:  # nor can the module be made whole
        host = HostOptimizers(sharding, num_threads=1)
        optimizer = adamw(net)
        host.attach([optimizer])
        loss_of(net, batch(0)).backward()
        with suppress(PlantedError):  # if the thread is that fast
            optimizer.step()
        for _ in range(2):
            with pytest.raises(PlantedError):
                host.finish()
            with pytest.raises(PlantedError):
                optimizer.step()
        host.let_go({})
        num_heard = 2
    assert num_heard == 2


# --- steps in the backward ---


@pytest.mark.parametrize("mode", [mode for mode in HOST_MODES if mode != "half apart"])  # some step in this thread
def test_early_steps_begin_with_the_last_layers_and_before_the_backward_is_over(mesh, mode):
    net, begun = make(), []
    with hosted(net, mode) as host:
        host.may_step_early = lambda optimizer: True
        optimizer = adamw(net)
        host.attach([optimizer])
        names = {id(shard): name for name, shard in net.named_parameters()}
        submit = host._submit

        def note(step_round: Any, group: Any, parameters: Any) -> None:
            parameters = list(parameters)
            if threading.current_thread() is not threading.main_thread():
                begun.append(names[id(parameters[0])].rpartition(".")[0])
            submit(step_round, group, parameters)

        host._submit = note
        step_by_closure(net, optimizer, 0)
    assert begun == ["head", "blocks.2.up", "blocks.1.up", "norm", "blocks.0.up"]


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blocks[0](x))


@pytest.mark.parametrize("mode", HOST_MODES)
def test_a_layer_that_is_called_twice_is_stepped_with_both_gradients(mesh, mode):
    net, plain = make(Twice), make(Twice)
    reference = plain_adamw(plain)
    with hosted(net, mode) as host:
        host.may_step_early = lambda optimizer: True
        optimizer = adamw(net)
        host.attach([optimizer])
        for seed in range(3):
            step_by_closure(net, optimizer, seed)
            step_by_closure(plain, reference, seed)
        assert_same(weights(net), weights(plain))


def test_without_a_closure_or_with_a_hook_that_looks_at_gradients_no_step_is_early(mesh):
    net, seen = make(), []
    with hosted(net) as host:
        host.may_step_early = lambda optimizer: True
        optimizer = adamw(net)
        host.attach([optimizer])
        host._landed = lambda group: seen.append(host._early is not None)
        host._sharding.on_landed = host._landed
        take_step(net, optimizer)
        optimizer.register_step_pre_hook(lambda *args: None)
        step_by_closure(net, optimizer, 1)
        assert seen
        assert not any(seen)


@pytest.mark.skipif(not can_recover(), reason="needs torch 2.13")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_a_failed_iteration_training_goes_on_as_if_it_had_not_been(mesh, mode, where):
    net, plain = make(), make()
    reference = plain_adamw(plain)
    with hosted(net, mode) as host:
        optimizer = adamw(net, fused=True)
        host.attach([optimizer])
        for seed in range(3):
            with pytest.raises(PlantedError):
                fail_in(net, where)
            discard_failed_iteration(net)
            net.zero_grad()
            take_step(net, optimizer, seed)
            take_step(plain, reference, seed)
            assert_same(weights(net), weights(plain))


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


@pytest.mark.parametrize("mode", MODES)
def test_a_state_dict_can_be_loaded_into_another_optimizer(mesh, mode):
    net, plain = make(), make()
    reference = plain_adamw(plain)
    with hosted(net, mode) as host:
        first = adamw(net, fused=True)
        host.attach([first])
        take_step(net, first)
        take_step(plain, reference)
        second = adamw(net, fused=True, lr=1.0)
        host.attach([second])
        second.load_state_dict(first.state_dict())
        for seed in (1, 2):
            take_step(net, second, seed)
            take_step(plain, reference, seed)
        assert_same(weights(net), weights(plain))
        assert_same(states(net, second), states(plain, reference))


def test_hooks_of_steps_are_called_once_and_may_change_gradients(mesh):
    net, plain = make(), make()
    reference = plain_adamw(plain)
    calls: list[str] = []
    with hosted(net) as host:
        optimizer = adamw(net)
        host.attach([optimizer])
        for each in (optimizer, reference):
            each.register_step_pre_hook(
                lambda some, *args: [p.grad.mul_(-1) for group in some.param_groups for p in group["params"]] and None
            )
        optimizer.register_step_pre_hook(lambda some, *args: calls.append(f"before {some is optimizer}"))
        optimizer.register_step_post_hook(lambda some, *args: calls.append(f"after {some is optimizer}"))
        for seed in range(2):
            take_step(net, optimizer, seed)
            take_step(plain, reference, seed)
        assert calls == ["before True", "after True"] * 2
        assert_same(weights(net), weights(plain))


def test_a_closure_is_called_once_and_its_loss_returned(mesh):
    net, calls = make(), []
    with hosted(net) as host:
        optimizer = adamw(net)
        host.attach([optimizer])
        assert optimizer.step(lambda: calls.append(torch.is_grad_enabled()) or 3.5) == 3.5
        assert calls == [True]
        assert optimizer.step() is None


def test_a_scaler_unscales_and_leaves_steps_out(mesh):
    net, plain = make(), make()
    reference = plain_adamw(plain)
    with hosted(net) as host:
        optimizer = adamw(net)
        host.attach([optimizer])
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
        for seed in range(4):
            for each, some, scaler in ((net, optimizer, scalers[0]), (plain, reference, scalers[1])):
                some.zero_grad()
                scaler.scale(loss_of(each, batch(seed) * (float("inf") if seed == 1 else 1))).backward()
                scaler.unscale_(some)
                scaler.step(some)
                scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
        assert_same(weights(net), weights(plain), 1e-6)


@pytest.mark.parametrize("may_wait", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_norms_are_clipped_as_pytorch_does_it(mesh, mode, may_wait):
    net, plain = make(), make()
    reference = plain_adamw(plain)
    with hosted(net, mode) as host:
        optimizer = adamw(net, fused=True)
        host.attach([optimizer])
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
            assert_same(weights(net), weights(plain))
            assert_same(gradients(net), gradients(plain))


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
    fresh = adamw(make())
    fresh.step()
    assert owner_of(fresh) is None


# --- two ranks ---


def train_on_two() -> None:
    for mode in MODES:
        for is_early in (False, True):
            for kind in (partial(optim.AdamW, eps=1e-5, lr=1e-3), Foreign):
                net, plain = make(), make()
                reference = kind(plain.parameters())
                with hosted(net, mode) as host:
                    host.may_step_early = lambda optimizer, is_early=is_early: is_early
                    optimizer = kind(net.parameters())
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        host.attach([optimizer])
                    for seed in range(2):

                        def closure(net: nn.Module = net, seed: int = seed) -> None:
                            net.zero_grad()
                            loss_of(net, part(batch(seed))).backward()

                        if kind is Foreign:
                            closure()
                            optimizer.step()
                        else:
                            optimizer.step(closure)
                            host.clip_norm(optimizer, 1e9, may_wait=False)
                        take_step(plain, reference, seed)
                    assert_same(weights(net), weights(plain), 1e-5)
                assert_same(weights(net), weights(plain), 1e-5)


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
            reference = plain_adamw(plain, **options)
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
    on_ranks(tmp_path, train_on_two, leave_out_on_two)
