"""Truth values that hold for a whole tensor: nothing is ever infinite or NaN, and everything equals itself."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.private_names.torch.operators import TO_COPY, UNSAFE_VIEW
from lightning_vram.private_names.torch.tensors import storage_identity

_aten = torch.ops.aten
_ANSWERS = {
    **{_aten.isnan.default: False, _aten.isinf.default: False, _aten.isfinite.default: True},
    **{_aten.ones.default: True, _aten.zeros.default: False},
}
_WITH_ITSELF = {_aten.eq.Tensor: True, _aten.ne.Tensor: False}
_WITH_INFINITY = {_aten.eq.Scalar: False, _aten.ne.Scalar: True}
_SAME = (
    *(_aten.any.default, _aten.all.default, _aten.any.dim, _aten.all.dim, TO_COPY, _aten.clone.default),
    *(_aten.unsqueeze.default, _aten.expand.default, _aten.view.default, _aten.slice.Tensor, _aten.select.int),
    *(_aten.permute.default, _aten.upsample_nearest2d.default, UNSAFE_VIEW),
)
_NOT = (_aten.bitwise_not.default, _aten.logical_not.default)
_AND = (_aten.mul.Tensor, _aten.bitwise_and.Tensor, _aten.logical_and.default)
_OR = (_aten.bitwise_or.Tensor, _aten.logical_or.default)


class UniformTruths:
    """Remembers what follows from such questions: ``torch.isfinite`` asks two of them, and multiplies the answers."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Learn from what an operator has returned."""
        truth = self._follows(func, args)
        if truth is not None:
            self._known[result] = truth

    def forget(self, written: Iterable[Tensor]) -> None:
        """Forget what is said of tensors that share memory with these, which are written to."""
        if self._known:
            memory = {storage_identity(tensor) for tensor in written if isinstance(tensor, FakeTensor)}
            for tensor in [one for one in self._known if storage_identity(one) in memory]:
                del self._known[tensor]

    def of(self, tensor: Tensor) -> bool | None:
        """Return the truth value of all elements; ``None`` if it is not known."""
        truth: bool | None = self._known.get(tensor)
        return truth

    def _follows(self, func: Any, args: tuple[Any, ...]) -> bool | None:
        if func in _ANSWERS:
            return _ANSWERS[func]
        if func in _WITH_ITSELF and args[0] is args[1]:
            return _WITH_ITSELF[func]
        if func in _WITH_INFINITY and isinstance(args[1], float) and math.isinf(args[1]):
            return _WITH_INFINITY[func]
        if func in _WITH_INFINITY and args[1] in (0, 1) and args[0] in self._known:  # what is true is 1
            return (self._known[args[0]] == args[1]) is (func is _aten.eq.Scalar)
        return self._combined(func, args) if func in (*_SAME, *_NOT, *_AND, *_OR) else None

    def _combined(self, func: Any, args: tuple[Any, ...]) -> bool | None:
        truths = [self._known.get(arg) for arg in args if isinstance(arg, Tensor)]
        if None in truths or (func in (*_AND, *_OR) and len(truths) == 1):  # times a number
            return None
        if func in _NOT:
            return not truths[0]
        return any(truths) if func in _OR else all(truths)
