"""Workloads of any size, and the search for the largest that does what it should."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.cases import Workload


@dataclass(frozen=True)
class Growth:
    """A workload of any size.

    Args:
        what: What grows: ``batch size``, or ``layers``.
        name: Of the workload, without that size.
        make: Makes it of a size.
        size: That it has in the other suites.
    """

    what: str
    name: str
    make: Callable[[int], Workload]
    size: int


def grow_batch(workload: Workload) -> Growth:
    """Return the workload with batches of any size: several of its own, cut off."""
    with torch.device("meta"):
        own = len(workload.make_batch()[0])

    def make_batch(size: int) -> tuple[Tensor, ...]:
        several = [workload.make_batch() for _ in range(-(-size // own))]
        return tuple(torch.cat(parts)[:size].clone() for parts in zip(*several, strict=True))

    def make(size: int) -> Workload:
        return replace(workload, make_batch=partial(make_batch, size))

    return Growth("batch size", workload.name, make, own)


def grow_layers(workload: Workload) -> Growth:
    """Return the workload with any number of layers, in each stage if it has several: the model's first argument."""
    model: Any = workload.make_model
    own, *others = model.args

    def make(size: int) -> Workload:
        layers = tuple(size for _ in own) if isinstance(own, tuple) else size
        return replace(workload, make_model=partial(model.func, layers, *others))

    is_staged = isinstance(own, tuple)
    return Growth("layers in each stage" if is_staged else "layers", workload.name, make, own[0] if is_staged else own)


def largest_that(trains: Callable[[int], bool], start: int = 1) -> int:
    """Return the largest size of which ``trains`` holds, as for all smaller ones.

    From where it begins it goes on by steps that double, until the answer changes; then it bisects.

    Args:
        trains: Of a size of at least 1.
        start: Where to begin.

    Returns:
        0 if not even 1 does.
    """
    last, step = start, 1
    if trains(start):
        while trains(start + step):
            last, step = start + step, 2 * step
        return _between(trains, last, start + step)
    while start - step > 0:
        if trains(start - step):
            return _between(trains, start - step, last)
        last, step = start - step, 2 * step
    return _between(trains, 0, last)


def _between(trains: Callable[[int], bool], good: int, bad: int) -> int:
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if trains(middle) else (good, middle)
    return good
