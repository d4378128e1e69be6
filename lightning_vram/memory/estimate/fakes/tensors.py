"""Fake tensors in the place of real ones: same shapes, strides, storages and ties, no bytes."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_vram.private_names.torch.dispatch import (
    FakeTensor,
    FakeTensorMode,
    is_traceable_wrapper_subclass,
    without_dispatch,
)
from lightning_vram.private_names.torch.fakes import mark_parameter
from lightning_vram.private_names.torch.optimizers import FOREACH_TYPES
from lightning_vram.private_names.torch.tensors import storage_key

_Copied = TypeVar("_Copied")


class FakeTensors:
    """Makes fakes of tensors; what shared a storage shares one again."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._mode = mode
        self._device = device
        self._by_tensor: dict[int, tuple[Tensor, Tensor]] = {}  # with the real one, whose id must not be used again
        self._by_storage: dict[int, torch.UntypedStorage] = {}

    def fake(self, tensor: Tensor) -> Tensor:
        """Return the fake of ``tensor``, the same at each call. A parameter gives a parameter."""
        if id(tensor) not in self._by_tensor:
            self._by_tensor[id(tensor)] = tensor, self._make(tensor)
        return self._by_tensor[id(tensor)][1]

    def copy_of(self, nest: _Copied, tensors: Iterable[Tensor]) -> _Copied:
        """Copy an object deeply, with fakes in the place of ``tensors``."""
        memo: dict[int, Any] = {id(tensor): self.fake(tensor) for tensor in tensors}
        return copy.deepcopy(nest, memo)

    def _make(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        wrapper: Any = tensor
        if is_traceable_wrapper_subclass(wrapper) or tensor.layout is not torch.strided:
            made: Tensor = self._mode.from_tensor(tensor)
            return made
        storage = tensor.untyped_storage()
        shared = self._by_storage.get(storage_key(storage))
        made = fake_of(tensor, self._mode, self._device, shared)
        self._by_storage[storage_key(storage)] = made.untyped_storage()
        return made


def fake_of(
    tensor: Tensor, mode: FakeTensorMode, device: torch.device, storage: torch.UntypedStorage | None = None
) -> Tensor:
    """Return a fake of ``tensor``, fake or not, which no operator has made: no tracker sees its birth."""
    with without_dispatch(), torch.no_grad():
        if storage is None:
            storage = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        elements = torch.empty(0, dtype=tensor.dtype, device="meta")
        elements.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    fake: Tensor = FakeTensor(mode, elements, device)
    if isinstance(tensor, nn.Parameter):
        with mode:
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def fake_bytes(storage: torch.UntypedStorage, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Return the bytes of the storage of a fake as a flat fake; under a mode, ``set_`` would keep it for good."""
    with without_dispatch():
        elements = torch.empty(0, dtype=torch.uint8, device="meta").set_(storage)
    flat: Tensor = FakeTensor(mode, elements, device)
    return flat


class FakeParameter(FakeTensor):
    """A fake tensor that is a parameter."""


@contextmanager
def taken_together() -> Iterator[None]:
    """Let optimizers and clipping work on many fakes at once, as they do on real ones: they go by the class."""
    fakes = [FakeTensor, FakeParameter]
    with ExitStack() as stack:
        for types in FOREACH_TYPES:
            types[:0] = fakes
            stack.callback(types.__delitem__, slice(len(fakes)))
        yield


def make_parameter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what ``nn.Parameter.__new__`` is to be for parameters of fakes to be :class:`FakeParameter`."""

    def new(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> Any:  # noqa: FBT001, FBT002
        if not isinstance(data, FakeTensor):
            return original(cls, data, requires_grad)
        parameter: Any = data.detach().requires_grad_(requires_grad)
        parameter.__class__ = FakeParameter
        mark_parameter(parameter)
        return parameter

    return new
