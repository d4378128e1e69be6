"""Weights that use no memory though they are real tensors: nothing is ever written to them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.memory.units import MIB
from lightning_vram.private_names.torch.dispatch import TorchDispatchMode

_MIN_BYTES = MIB
# What torch.nn.init and its like write with.
_WRITES = frozenset(
    f"aten::{name}_"
    for name in ("normal", "uniform", "fill", "zero", "copy", "erfinv", "mul", "add", "clamp", "random")
)
_DRAWS = frozenset({"aten::randn", "aten::rand"})
_CLONE = "aten::clone"


class UntouchedWeights(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skip, in a ``with`` block, the first values of large tensors on the host: only for looking at a module's sizes.

    An operating system gives a process pages when they are first written to. Unlike on the meta device, small tensors
    have their values, so a constructor may look at them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.name().partition(".")[0]  # type: ignore[attr-defined]  # an operator
        if name in _WRITES and _is_large(args[0]):
            return args[0]
        if name == _CLONE and _is_large(args[0]):
            return torch.empty_like(args[0], **kwargs)
        if name in _DRAWS:
            empty = torch.empty(args[0], **{key: value for key, value in kwargs.items() if key != "generator"})
            if _is_large(empty):
                return empty
        return func(*args, **kwargs)


def _is_large(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() >= _MIN_BYTES
