"""Modules whose parameters are used without calling them."""

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_vram.techniques.sharding.grouping import find_entered_modules, find_read_modules


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(3, 2), nn.Sequential(nn.Linear(2, 2))
        self.inner.deep = nn.Linear(2, 2)

    def helper(self) -> Tensor:
        return self.embedding.weight


def decorated(function):
    @functools.wraps(function)
    def run(*args):
        return function(*args)

    return run


class Direct(Parts):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.weight.T


class Decorated(Parts):
    @decorated
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.weight.T


class ByMethod(Parts):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.helper()


class InComprehension(Parts):
    def forward(self, hidden: Tensor) -> list[Tensor]:
        return [row @ self.embedding.weight.T for row in hidden]


class InStep(Parts):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch @ self.embedding.weight.T


class Deep(Parts):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.inner.deep.weight


class OnlyAsked(Parts):
    def forward(self, hidden: Tensor) -> Tensor:
        assert self.embedding.weight.requires_grad
        return self.inner(hidden.to(self.embedding.weight.dtype))


class InSetup(Parts):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)

    def tie(self) -> None:
        self.inner.deep.weight = self.embedding.weight


def names_of(root: nn.Module, found: set[nn.Module]) -> set[str]:
    return {name for name, module in root.named_modules() if module in found}


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        *((kind, {"embedding"}) for kind in (Direct, Decorated, ByMethod, InComprehension)),
        (InStep, {"", "embedding"}),  # the model itself has no forward
        (Deep, {"inner", "inner.deep"}),
        (OnlyAsked, set()),  # a shard answers as well
        (InSetup, set()),
    ],
)
def test_a_weight_that_a_forward_or_a_step_reads_is_found(kind, found):
    model = kind()
    assert names_of(model, find_read_modules(model)) == found


def test_the_parts_of_attention_and_parametrizations_and_containers_are_read():
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(4, 2),
            "layer": parametrizations.weight_norm(nn.Linear(2, 2)),
            "list": nn.ModuleList([nn.Linear(2, 2)]),
        }
    )
    assert names_of(model, find_read_modules(model)) == {
        "",
        "attention.out_proj",
        "layer.parametrizations",
        "layer.parametrizations.weight",
        "layer.parametrizations.weight.0",
        "list",
    }


class Codec(Parts):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.decode(hidden)

    def decode(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)


class Entering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codec, self.plain = Codec(), Codec()

    def forward(self, hidden: Tensor) -> Tensor:
        self.plain.requires_grad_(True)
        return self.codec.decode(self.plain(hidden))


def test_a_module_that_is_entered_by_another_method_is_found():
    model = Entering()
    assert names_of(model, find_entered_modules(model)) == {"codec"}
    assert torch.is_tensor(model(torch.ones(2)))
