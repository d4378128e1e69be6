"""Properties of tensors: ordinary classes, versions, memory, layout, shards; and tensors in nested structures.

While saved-tensor hooks are set, autograd does not check whether a saved tensor was overwritten. The functions for
versions do. Nested structures are what modules take and return: pytrees, and dataclasses, which torch does not open. No
input is changed. ``tree_flatten`` makes a function that refers to itself for every call: garbage that only the cyclic
collector finds, dozens of times per layer and step. Arguments and results are flat nearly always, and are flattened
without it then.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_vram.memory.estimate.fakes.tensors import FakeParameter
from lightning_vram.private_names.torch.dispatch import FakeTensor

Result = TypeVar("Result")
OURS = "_lightning_vram_"
"""How attributes begin that we put on tensors."""

PARAMETER_CLASSES: set[type] = {nn.Parameter, FakeParameter}
REAL_TYPES: set[type] = {Tensor, nn.Parameter}
"""Ordinary ones that hold values."""
PLAIN_TYPES: set[type] = {Tensor, nn.Parameter, nn.Buffer, FakeTensor, FakeParameter}


def add_parameter_class(kind: type[nn.Parameter]) -> None:
    """Treat a class of ours, which only watches what is done with a parameter, as an ordinary one."""
    PARAMETER_CLASSES.add(kind)
    PLAIN_TYPES.add(kind)
    REAL_TYPES.add(kind)


def while_plain(tensor: Any, kind: type, do: Callable[[], Result]) -> Result:
    """Copy or save ``tensor`` as one of class ``kind`` that has no attribute of ours."""
    ours, known = type(tensor), vars(tensor)
    aside = {key: known.pop(key) for key in list(known) if key.startswith(OURS)}
    tensor.__class__ = kind
    try:
        return do()
    finally:
        tensor.__class__ = ours
        known.update(aside)
