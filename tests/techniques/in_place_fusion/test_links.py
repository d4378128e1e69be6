"""A link is reported if, and only if, the tensor between two modules is theirs alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_vram.techniques.in_place_fusion.observed_links import StepObserver


def image() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 8, 8)


class Pair(nn.Module):
    """Two convolutions and two norms; how they are called comes with it."""

    def __init__(self, body: Callable[["Pair", Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.other_conv, self.other_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.body = body
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def find(net: nn.Module, *, backward: bool = True, step: Callable[[], Any] | None = None) -> list[tuple[str, str]]:
    """The links of one training step, by name."""
    names = {module: name for name, module in net.named_modules()}
    with StepObserver(net, (nn.Conv2d,), (nn.BatchNorm2d,)) as observer:
        output = net(image().requires_grad_()) if step is None else step()
        if backward and isinstance(output, Tensor):
            output.sum().backward()
    return [(names[link.producer], names[link.consumer]) for link in observer.links]


class SaveOnly(torch.autograd.Function):
    """Uses its input in the backward, and runs no operator on it before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grad * x, grad


def twice(m: Pair, x: Tensor) -> Tensor:
    return m.norm(m.conv(m.norm(m.conv(x)).relu()))


LINKED: dict[str, Callable[[Pair, Tensor], Any]] = {
    "nested": lambda m, x: m.norm(m.conv(x)).relu(),
    "called twice": twice,
    "under checkpoint, which ends on time": lambda m, x: checkpoint(
        lambda y: m.norm(m.conv(y)), x, use_reentrant=False
    ),
}


def skip(m: Pair, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.norm(y) + y


def returned(m: Pair, x: Tensor) -> Any:
    y = m.conv(x)
    return m.norm(y), y


def kept(m: Pair, x: Tensor) -> Tensor:
    m.kept = m.conv(x)
    return m.norm(m.kept)


def written_between(m: Pair, x: Tensor) -> Tensor:
    return m.norm(m.conv(x).mul_(2))


def two_consumers(m: Pair, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.norm(y) + m.other_norm(y)


def one_call_without(m: Pair, x: Tensor) -> Tensor:
    return m.norm(m.conv(x)) + m.conv(x)


def gradient_hook(m: Pair, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.register_hook(lambda grad: grad * 2)
    return m.norm(y)


def saved_by_another(m: Pair, x: Tensor) -> Tensor:
    y = m.conv(x)
    return SaveOnly.apply(y, m.norm(y))


def detached(m: Pair, x: Tensor) -> Tensor:
    y = m.conv(x)
    m.kept = y.detach()
    return m.norm(y)


def two_arguments(m: Pair, x: Tensor) -> Tensor:
    return m.norm(input=m.conv(x))


APART: dict[str, Callable[[Pair, Tensor], Any]] = {
    "skip": skip,
    "returned": returned,
    "kept": kept,
    "detached": detached,
    "first in a reentrant checkpoint": lambda m, x: checkpoint(m.norm, m.conv(x), use_reentrant=True),
    "written between": written_between,
    "two consumers": two_consumers,
    "one call without": one_call_without,
    "something between": lambda m, x: m.norm(m.conv(x).relu()),
    "gradient hook": gradient_hook,
    "saved by a function of the user": saved_by_another,
    "torch.func": lambda m, x: torch.func.grad(lambda y: m.norm.eval()(m.conv(y)).sum())(x).sum().requires_grad_(),
    "by keyword": two_arguments,
}


@pytest.mark.parametrize("backward", [True, False], ids=["step", "forward"])
@pytest.mark.parametrize("name", LINKED)
def test_what_feeds_only_one_is_linked(name: str, backward: bool) -> None:
    if "checkpoint" in name and backward:
        pytest.skip("recomputed modules are left alone")
    assert find(Pair(LINKED[name]), backward=backward) == [("conv", "norm")]


@pytest.mark.parametrize("backward", [True, False], ids=["step", "forward"])
@pytest.mark.parametrize("name", APART)
def test_what_others_may_see_is_not(name: str, backward: bool) -> None:
    assert find(Pair(APART[name]), backward=backward) == []


def test_modules_that_run_again_in_the_backward_are_not_linked() -> None:
    net = Pair(LINKED["under checkpoint, which ends on time"])
    assert find(net) == []


HOOKS: dict[str, Callable[[Pair], Any]] = {
    "forward of the producer": lambda m: m.conv.register_forward_hook(lambda *_: None),
    "full backward of the producer": lambda m: m.conv.register_full_backward_hook(lambda *_: None),
    "pre-forward of the consumer": lambda m: m.norm.register_forward_pre_hook(lambda *_: None),
    "forward of the consumer": lambda m: m.norm.register_forward_hook(lambda *_: None),
    "of all modules": lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m.conv),
}


@pytest.mark.parametrize("name", HOOKS)
def test_what_a_hook_sees_is_not_linked(name: str) -> None:
    net = Pair(LINKED["nested"])
    hook = HOOKS[name](net)
    try:
        assert find(net) == []
    finally:
        if hasattr(hook, "remove"):
            hook.remove()


def test_a_hook_on_a_container_sees_the_output_of_its_last_module() -> None:
    net = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 3, 1)), nn.BatchNorm2d(3))
    assert find(net) == [("0.1", "1")]
    net[0].register_forward_hook(lambda *_: None)
    assert find(net) == []


def test_shared_modules_are_one() -> None:
    conv, norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
    assert find(nn.Sequential(conv, norm, nn.ReLU(), conv, norm)) == [("0", "1")]
    assert find(nn.Sequential(conv, norm, conv, nn.BatchNorm2d(3))) == []
