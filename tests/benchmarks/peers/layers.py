"""The layers that others checkpoint or shard: the ones that ours chooses, so that all do the same."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import nn

from lightning_vram.core.layers import select_layers
from tests.benchmarks.cases import Workload


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return them."""
    return [layer.module for layer in select_layers(model).layers]


def kinds_of_layers(workload: Workload) -> set[type[nn.Module]]:
    """Return their classes; no memory is needed for that."""
    with torch.device("meta"):
        return {type(layer) for layer in layers_of(workload.make_model())}


def frozen_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Frozen linear layers by name, but for a head whose weight is that of an embedding."""
    tied = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    linears = {name: part for name, part in model.named_modules() if type(part) is nn.Linear}
    return {name: one for name, one in linears.items() if not one.weight.requires_grad and id(one.weight) not in tied}


class AroundForward:
    """A new context for each forward."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._make())

    def __exit__(self, *error: object) -> None:
        self._stack.close()
