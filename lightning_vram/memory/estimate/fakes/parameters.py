"""Fake parameters that are known by their class, as real ones are: whoever asks for it finds what it would find."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.private_names.torch.fakes import mark_parameter
from lightning_vram.private_names.torch.optimizers import FOREACH_TYPES


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
