"""Tensors in nests of arguments, in the order in which torch finds them."""

from collections import OrderedDict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_vram.private_names.torch import tensors_in, tree_leaves


class Pair(NamedTuple):
    """Is taken apart by torch, too."""

    first: Any
    second: Any


_A, _B, _C = torch.zeros(1), torch.zeros(2), torch.zeros(3)
TREES: dict[str, Any] = {
    "a tensor": _A,
    "a parameter": torch.nn.Parameter(torch.zeros(1)),
    "arguments": ((_A, [_B, None, 2], 1.0, torch.float32), {"out": (_C, "sum")}),
    "a named tuple": (Pair(_A, [_B]), _C),
    "other containers": [OrderedDict(b=_B, a=_A), deque([_C])],
    "dictionaries": {"b": _B, "a": {"c": _C}},
    "objects that torch does not know": [object(), {1, 2}, torch.device("cpu"), _A],
    "nothing": None,
}


@pytest.mark.parametrize("name", TREES)
def test_the_tensors_are_those_among_torchs_leaves(name: str) -> None:
    expected = [leaf for leaf in tree_leaves(TREES[name]) if isinstance(leaf, Tensor)]
    found = list(tensors_in(TREES[name]))
    assert len(found) == len(expected)
    assert all(one is other for one, other in zip(found, expected, strict=True))
