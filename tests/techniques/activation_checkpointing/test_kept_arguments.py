"""Objects as arguments: a second run finds them as the first did, whatever was done to them since, and counts once."""

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing


class Graph:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class CallableGraph(Graph):
    """As ``torch_geometric.data.Data``, which iterates over its attributes when it is called."""

    def __call__(self) -> list[str]:
        return list(vars(self))


class Stored(Graph):
    """Keeps its tensors in a dict."""

    def __init__(self, x: Tensor) -> None:
        self.store = {"x": x}

    x = property(lambda self: self.store["x"], lambda self, value: self.store.update(x=value))


class Deep(Graph):
    """Keeps them in lists of objects."""

    def __init__(self, x: Tensor) -> None:
        self.levels = deque([[Stored(x)]])

    x = property(lambda self: self.levels[0][0].x, lambda self, value: setattr(self.levels[0][0], "x", value))


class DotDict(dict):
    """Raises ``KeyError`` where ``hasattr`` expects ``AttributeError``."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__

    def __init__(self, x: Tensor) -> None:
        super().__init__(x=x)


@dataclass
class Record:
    x: Tensor
    seen: list[int] = field(default_factory=list)


class Layer(nn.Module):
    """Ends in a weight that starts at zero: what it returns tells nothing of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.zeros_(self.down.weight)

    def forward(self, graph: Any) -> Tensor:
        return graph.x + self.down(torch.tanh(self.up(graph.x)))


class Net(nn.Module):
    """Lets each layer replace the tensor in one object."""

    def __init__(self, make_graph: Callable[[Tensor], Any], make_layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.make_graph = make_graph
        self.enter, self.layers = nn.Linear(8, 8), nn.ModuleList(make_layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        graph = self.make_graph(self.enter(x))
        for layer in self.layers:
            graph.x = layer(graph)
        return graph.x


def train(net: nn.Module, num_steps: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        net(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("kind", [CallableGraph, Deep, DotDict, Record])
def test_an_object_is_as_it_was_in_the_forward(kind):
    torch.manual_seed(0)
    plain = Net(kind)
    checkpointed = copy.deepcopy(plain)
    apply_activation_checkpointing(checkpointed, layers="Layer")
    assert all(map(torch.equal, train(checkpointed), train(plain)))


class Counting(Layer):
    """Writes into what it is given, and reads that."""

    def forward(self, graph: Record) -> Tensor:
        graph.seen.append(len(graph.seen))
        return super().forward(graph) * len(graph.seen)


def test_what_a_layer_writes_into_an_object_is_written_once():
    records: list[Record] = []
    net = Net(lambda x: records.append(Record(x)) or records[-1], Counting)
    apply_activation_checkpointing(net, layers="Counting")
    train(net, num_steps=1)
    assert records[0].seen == [0, 1, 2]


LARGE = 4096  # rows of 32 bytes: too many to be copied in each call


def test_a_large_tensor_in_an_object_that_is_overwritten_before_the_backward_is_an_error():
    layer, graph = nn.ModuleList([Layer()]), Graph(torch.randn(LARGE, 8))
    apply_activation_checkpointing(layer, layers="Layer")
    loss = layer[0](graph).sum()
    graph.x.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: an input of shape \[4096, 8\]"):
        loss.backward()


@dataclass
class Totals:
    """What programs pass along to add up in."""

    x: Tensor
    aux: Tensor = field(default_factory=lambda: torch.zeros(()))
    seen: Tensor = field(default_factory=lambda: torch.zeros(()))


class Adding(Layer):
    """Adds a loss in place to what it is given."""

    def forward(self, totals: Totals) -> Tensor:
        hidden = super().forward(totals)
        totals.aux += hidden.square().mean()
        return torch.tanh(hidden)


def test_totals_in_an_object_are_added_to_once_by_the_layer_and_by_others():
    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        layers, totals = nn.ModuleList([Adding(), Adding()]), Totals(torch.randn(4, 8))
        if is_checkpointed:
            apply_activation_checkpointing(layers, layers="Adding")
        for layer in layers:
            totals.x = layer(totals)
            totals.seen += totals.x.detach().mean()
        (totals.x.sum() + totals.aux).backward()
        results.append([totals.aux.detach(), totals.seen, *(p.grad for p in layers.parameters())])
    assert all(map(torch.equal, *results))


class Overwriting(Layer):
    def forward(self, graph: Graph) -> Tensor:
        graph.x.relu_()
        return super().forward(graph)


def test_a_layer_that_overwrites_a_large_tensor_in_an_object_is_refused():
    layer = nn.ModuleList([Overwriting()])
    apply_activation_checkpointing(layer, layers="Overwriting")
    with pytest.raises(
        RuntimeError, match=r"layer 0 \(Overwriting\) overwrites a tensor inside an input object, .* choose"
    ):
        layer[0](Graph(torch.randn(LARGE, 8)))
