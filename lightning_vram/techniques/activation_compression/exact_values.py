"""Tensors that must not be stored with an error: statistics, and what is made of weights or statistics."""

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.operators.exactness import gives_exact_result, is_constant, is_pointwise, iterate_tensors
from lightning_vram.core.operators.families import written_arguments
from lightning_vram.core.tensors.by_storage import ByStorage
from lightning_vram.core.tensors.versions import storage_address
from lightning_vram.private_names.torch.operators import schema_of
from lightning_vram.private_names.torch.tensors import base_of, is_view


class Origin(Enum):
    """What an exact tensor was made of."""

    WEIGHTS = auto()
    STATISTICS = auto()


class ExactValues:
    """The exact tensors of a run, followed through operators.

    What is made of weights alone counts as a weight, what is made of statistics element by element
    (``std.clamp(min=eps)``) as a statistic. A product of a statistic with a weight matrix is an ordinary activation.
    """

    def __init__(self) -> None:
        self._origins: ByStorage[Origin] = ByStorage()
        self.lasting: frozenset[int] = frozenset()
        """Addresses of the storages of further weights: buffers."""

    def clear(self) -> None:
        """Forget everything."""
        self._origins.clear()

    def __contains__(self, tensor: Tensor) -> bool:
        return self._origins.find(tensor) is not None

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Note that somebody may have written anything to ``tensors``."""
        for tensor in tensors:
            self._origins.drop(tensor)

    def origin_of_results(self, function: Any, args: Any, kwargs: dict[str, Any] | None) -> Origin | None:
        """Return what the results of a call are made of, if of nothing else. To be asked before the call."""
        origins: set[Origin] = set()
        has_tensors = False
        for tensor in iterate_tensors((*args, *(kwargs or {}).values()) if kwargs else args):
            has_tensors = True
            origin = self._origin_of(tensor)
            if origin is not None:
                origins.add(origin)
            elif tensor.numel() != 1 and tensor.dtype is not torch.bool:  # which neither adds nor takes anything
                return None
        if not has_tensors:
            return Origin.WEIGHTS if is_constant(function) else None
        if Origin.STATISTICS in origins:
            return Origin.STATISTICS if is_pointwise(function) or gives_exact_result(function) else None
        return Origin.WEIGHTS if origins else None

    def note_results(self, function: Any, results: Any, origin: Origin | None) -> None:
        """Note what ``function`` returned."""
        if origin is not None:
            self._note(iterate_tensors((results,)), origin)
            return
        is_exact = gives_exact_result(function)
        if isinstance(results, Tensor | list) and is_exact:
            self._note(iterate_tensors((results,)), Origin.STATISTICS)
        elif written_arguments(function):
            self.drop(iterate_tensors((results,)))  # in place: it was exact before
        if isinstance(results, tuple | list) and has_statistics(function):
            self._note(results[0 if is_exact else 1 :], Origin.STATISTICS)

    def _origin_of(self, tensor: Tensor) -> Origin | None:
        base = base_of(tensor) if is_view(tensor) else tensor
        if isinstance(base, nn.Parameter) or storage_address(tensor) in self.lasting:
            return Origin.WEIGHTS
        return self._origins.find(tensor)

    def _note(self, tensors: Iterable[Any], origin: Origin) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._origins.note(tensor, origin)


def has_statistics(function: Any) -> bool:
    """Whether it gives several tensors that are no views: what comes after the first is for its backward."""
    returns = schema_of(function).returns
    return len(returns) > 1 and all(str(r.type) == "Tensor" and r.alias_info is None for r in returns[:2])
