from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from typing_extensions import override

from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber, current_subscribers
from lightning_vram.techniques.activation_compression.stage import CompressionStage
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

aten = torch.ops.aten


class Names(OperatorSubscriber):
    def __init__(self, log: list[str] | None = None, name: str = "") -> None:
        self.log, self.name = [] if log is None else log, name

    @override
    def before(self, func, args, kwargs):
        self.log.append(f"{self.name}before {func.overloadpacket.__name__}")

    @override
    def after(self, func, args, kwargs, result):
        assert isinstance(result, Tensor)
        self.log.append(f"{self.name}after {func.overloadpacket.__name__}")


def test_a_subscriber_sees_operators_while_it_is_entered():
    names = Names()
    with names:
        torch.ones(2).neg()
    torch.ones(2).exp()
    assert names.log == ["before ones", "after ones", "before neg", "after neg"]
    assert _get_current_dispatch_mode_stack() == []


def test_subscribers_share_one_mode_and_the_innermost_gets_an_operator_first():
    log: list[str] = []
    with Names(log, "outer "):
        with Names(log, "inner "):
            assert len(_get_current_dispatch_mode_stack()) == 1
            torch.ones(2)
        assert log == ["inner before ones", "outer before ones", "outer after ones", "inner after ones"]
        torch.ones(2)
    assert log[4:] == ["outer before ones", "outer after ones"]


def test_what_is_entered_in_a_thread_of_autograd_does_not_see_other_threads():
    """Those of devices run at the same time and get the modes of the caller, as model parallelism has them."""
    outer, inner = Names(), Names()

    def run(mode):
        with mode, inner:
            torch.ones(2)
            threads.submit(run_beside, mode).result()

    def run_beside(mode):
        with mode:
            torch.zeros(2)

    with outer, ThreadPoolExecutor(2) as threads:
        threads.submit(run, *_get_current_dispatch_mode_stack()).result()
    assert inner.log == ["before ones", "after ones"]
    assert outer.log == ["before ones", "after ones", "before zeros", "after zeros"]


def test_a_subscriber_is_entered_once_at_a_time():
    names = Names()
    with names, pytest.raises(RuntimeError, match=r"^this Names observes operators already\.$"), names:
        pass
    assert _get_current_dispatch_mode_stack() == []


def test_a_paused_subscriber_lets_operators_pass_that_others_see():
    outer, inner = Names(), Names()
    with outer, inner, inner.paused():
        torch.ones(2)
    assert (len(outer.log), inner.log) == (2, [])


def test_what_a_subscriber_computes_is_its_own():
    class Computing(Names):
        @override
        def after(self, func, args, kwargs, result):
            result.exp()

    outer = Names()
    with outer, Computing():
        torch.ones(2)
    assert outer.log == ["before ones", "after ones"]


def test_a_subscriber_may_run_an_operator_differently():
    class Ones(OperatorSubscriber):
        @override
        def on_operator(self, func, types, args, kwargs):
            return self.run(aten.abs.default if func is aten.neg.default else func, types, args, kwargs)

    outer = Names()
    with outer, Ones():
        result = torch.ones(2).neg()
    assert result.tolist() == [1.0, 1.0]
    assert outer.log[-1] == "after abs"


def test_techniques_do_not_observe_a_backward_and_observe_again_after_it():
    layer = nn.Linear(8, 8)
    seen = []
    with CompressionStage(layer), Recomputation(layer):
        output = layer(torch.randn(4, 8))
        output.register_hook(lambda _: seen.append(len(_get_current_dispatch_mode_stack())))
        output.sum().backward()
        seen.append(len(current_subscribers()))
    assert seen == [0, 2]
