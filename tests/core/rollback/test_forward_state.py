"""A forward that runs twice finds what it found, and counts once."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_vram.core.rollback import ForwardFacts, ForwardState


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, *generators: object) -> None:
        super().__init__()
        self.generators = list(generators)
        self.last = generators[-1]

    def forward(self, input: Tensor) -> Tensor:
        for generator in (*self.generators, self.last):
            if isinstance(generator, torch.Generator):
                input = input + torch.rand((), generator=generator)
            else:
                input = input + generator.random()
        return input


class Listing(nn.Module):
    """Remembers what it has seen."""

    def __init__(self, num_seen: int) -> None:
        super().__init__()
        self.seen = list(range(num_seen))

    def forward(self, input: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        return input + len(self.seen)


def run_twice(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the results of a first run and of one in its place."""
    state, input = ForwardState((module,), ForwardFacts()), torch.zeros(())
    first = module(input)
    state.settle()
    return first, state.run(lambda: module(input))


@pytest.mark.parametrize("make", [torch.Generator, lambda: random.Random(1), lambda: np.random.default_rng(1)])
def test_generators_of_a_module_give_the_same_numbers_again_and_go_on(make):
    alone = Noise(make(), make())
    expected = [alone(torch.zeros(())) for _ in range(2)]
    module = Noise(make(), make())
    assert run_twice(module) == (expected[0], expected[0])
    assert module(torch.zeros(())) == expected[1]


@pytest.mark.parametrize("num_seen", [3, 2000])
def test_what_is_added_to_a_list_stands_in_it_once(num_seen):
    module = Listing(num_seen)
    seen = module.seen
    assert run_twice(module) == (num_seen + 1, num_seen + 1)
    assert module.seen is seen
    assert seen == list(range(num_seen + 1))


class LateWriter(nn.Module):
    """Writes a large buffer in its second forward only."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(num_bytes // 4))
        self.num_calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 2:
            self.queue.add_(1)
        return input + self.queue.sum()


@pytest.mark.parametrize("num_bytes", [64, 1 << 20, (1 << 20) + 4])
def test_a_large_tensor_that_is_written_in_a_later_forward_only_is_refused(num_bytes):
    module, learned, input = LateWriter(num_bytes), ForwardFacts(), torch.zeros(())
    for call in (1, 2):
        state = ForwardState((module,), learned)
        first = module(input)
        if call == 2 and num_bytes > 1 << 20:
            with pytest.raises(RuntimeError, match=r"^layer LateWriter overwrites 'queue' in place in this"):
                state.settle()
            return
        state.settle()
        assert state.run(lambda: module(input)) == first
    assert module.num_calls == 2
    assert module.queue[0] == 1


def test_an_error_inside_leaves_the_module_as_it_was():
    module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    state = ForwardState((module,), ForwardFacts())
    state.settle()
    module.eval().requires_grad_(False)
    module.extra = [1]
    before, mean = dict(vars(module)), module[1].running_mean
    with pytest.raises(ZeroDivisionError):
        state.run(lambda: (module.train(), module.extra.append(2)) if hasattr(module, "extra") else 1 / 0)
    assert vars(module) == before
    assert module.extra == [1]
    assert module[1].running_mean is mean
    assert not any(parameter.requires_grad for parameter in module.parameters())
