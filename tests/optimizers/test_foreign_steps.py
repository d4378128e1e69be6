"""Optimizers that nobody has read: right where one rank has all of each parameter, else refused in one line."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.sharded_nets import (
    MODES,
    assert_same,
    batch,
    hosted,
    loss_of,
    make,
    on_ranks,
    part,
    take_step,
    weights,
    whole,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:.* is not one of torch.optim's")]


class Factored(Optimizer):
    """Has a state for each row, as Adafactor, and one beside it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.num_closures = 2

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            for _ in range(self.num_closures):
                with torch.enable_grad():
                    loss = closure()
                self._move()
        else:
            self._move()
        return loss

    def _move(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"rows": torch.zeros(parameter.shape[:1]), "moment": torch.zeros(parameter.shape)}
                rows = parameter.grad.flatten(1).norm(dim=1) if parameter.dim() > 1 else parameter.grad.abs()
                state["rows"].mul_(0.9).add_(rows)
                state["moment"] = state["moment"] * 0.5 + parameter.grad  # another tensor at each step
                parameter.sub_(state["moment"], alpha=group["lr"])


def states(net: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    named = dict(net.named_parameters()).items()
    return {f"{n} {key}": whole(v).clone() for n, p in named for key, v in optimizer.state[p].items()}


@pytest.mark.parametrize("mode", MODES)
def test_one_that_makes_tensors_beside_parameters_steps_as_plainly_on_one_rank(mesh, mode):
    net, plain = make(), make()
    reference = Factored(plain.parameters())
    with hosted(net, mode) as host:
        optimizer = Factored(net.parameters())
        host.attach([optimizer])
        for seed in range(3):
            assert torch.equal(take_step(net, optimizer, seed), take_step(plain, reference, seed))
        assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
        assert {type(s["moment"]) for s in optimizer.state.values()} == {DTensor}  # so that checkpoints know it
        assert_same(states(net, optimizer), states(plain, reference))
    assert "step" not in vars(optimizer)
    assert_same(weights(net), weights(plain))
    assert_same(states(net, optimizer), states(plain, reference))
    take_step(net, optimizer)
    take_step(plain, reference)
    assert_same(weights(net), weights(plain))


def test_the_model_sees_what_was_written_before_a_second_closure(mesh):
    net, plain = make(), make()

    def train(net: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []

        def closure() -> Tensor:
            assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"]) is (net is not plain)
            net.zero_grad()
            losses.append(loss_of(net, batch(0)))
            losses[-1].backward()
            return losses[-1]

        for _ in range(2):
            assert optimizer.step(closure) is losses[-1]
        return losses

    expected = train(plain, Factored(plain.parameters()))
    with hosted(net) as host:
        optimizer = Factored(net.parameters())
        host.attach([optimizer])
        assert [loss.item() for loss in train(net, optimizer)] == [loss.item() for loss in expected]
    assert_same(weights(net), weights(plain))


def fail_on_two() -> None:
    net = make()
    with hosted(net) as host:
        optimizer = Factored(net.parameters())
        with pytest.warns(UserWarning, match="^" + re.escape(WARNING)):
            host.attach([optimizer])
        loss_of(net, part(batch(0))).backward()
        before = weights(net)
        with pytest.raises(RuntimeError, match="DTensor"):
            optimizer.step()
        assert_same(weights(net), before)


WARNING = (
    "Factored is not one of torch.optim's elementwise optimizers, such as AdamW: it steps on sharded tensors, which "
    "may raise errors of DTensor, and training waits for it."
)


def test_on_two_ranks_sharded_tensors_raise_after_a_warning(tmp_path):
    on_ranks(tmp_path, fail_on_two)
