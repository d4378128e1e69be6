"""Compare what autograd saves in a forward and in its recomputation."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.hooks.unfinished_saves import may_be_unfinished
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES, REAL_TYPES
from lightning_vram.core.tensors.versions import is_strided, storage_address
from lightning_vram.private_names.torch.autograd import num_nodes
from lightning_vram.private_names.torch.dispatch import without_dispatch
from lightning_vram.private_names.torch.tensors import base_of, is_view

_NUM_SAMPLES = 256
_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 5e-2}  # of the largest sample
_TOLERANCE = 1e-3
_FLOATING = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool}
)
_COMPARED = _FLOATING | {torch.int16, torch.int32, torch.int64}  # what can be compared on every device


class RecomputationError(RuntimeError):
    """A recomputation differs from the forward."""


def differed(name: str, reason: str, way_out: str) -> RecomputationError:
    """Return the error for a layer: ``reason`` says what differs, ``way_out`` what to do, in sentences."""
    return RecomputationError(
        f"recomputation of layer {name} diverged from the forward: {reason} Gradients would be wrong. Does the layer "
        "use a random number generator other than the global ones of torch, Python and NumPy, or a value that changes "
        f"between forward and backward? {way_out}"
    )


def is_due(number: int) -> bool:
    """Whether the call of this number (from 1) is compared: 1, 2, 4, 8, ...: also after a branch has left zero."""
    return number & (number - 1) == 0


class SavedSamples:
    """Samples of what autograd saves in one run of a layer with these buffers; ``first``: those of the forward.

    Parameters, buffers and views of either are left out: statistics go on moving. So are integers that are no indices:
    fused attention saves a seed without having set it, cuDNN its workspace.
    """

    def __init__(self, buffers: Iterable[Tensor] = (), first: "SavedSamples | None" = None) -> None:
        self._buffers: set[int] = {storage_address(one) for one in buffers} - {0}
        self._first = first
        self._samples: list[Tensor | None] = []
        self._pending: list[tuple[int, Tensor]] = []  # of the operator that is about to write them
        self._operator = -1

    def take(self, tensor: Tensor) -> None:
        """Take a sample of a tensor that is being saved."""
        if self._pending and num_nodes() != self._operator:
            self.settle()
        is_pending = may_be_unfinished(tensor)
        if is_pending:
            self._operator = num_nodes()
            self._pending.append((len(self._samples), tensor))
        self._samples.append(None if is_pending else self._sample(tensor))

    def settle(self) -> None:
        """Take the samples that had to wait until their operator had finished."""
        for place, tensor in self._pending:
            self._samples[place] = self._sample(tensor)
        self._pending.clear()

    def difference(self) -> str | None:
        """Return a sentence on the first tensor whose values differ from those in the forward."""
        self.settle()
        assert self._first is not None
        numbered = enumerate(zip(self._first._samples, self._samples, strict=False), 1)
        pairs = [(number, one, other) for number, (one, other) in numbered if one is not None and other is not None]
        with without_dispatch(), torch.no_grad():
            if _are_equal([(one, other) for _, one, other in pairs]):
                return None
            number = next((number for number, one, other in pairs if not is_close(one, other)), None)
        return None if number is None else f"Saved tensor {number} has other values."

    def _sample(self, tensor: Tensor) -> Tensor | None:
        base = base_of(tensor) if is_view(tensor) else tensor
        is_compared = tensor.dtype in _FLOATING or tensor.dim() > 0
        if not is_compared or type(base) in PARAMETER_CLASSES or storage_address(tensor) in self._buffers:
            return None
        return take_sample(tensor)


def take_sample(tensor: Any) -> Tensor | None:
    """Return some elements of a tensor, at equal distances; ``None`` if it has none that can be compared."""
    is_plain = type(tensor) in REAL_TYPES and is_strided(tensor)
    if not is_plain or tensor.is_meta or tensor.numel() == 0 or tensor.dtype not in _COMPARED:
        return None
    distance = -(-tensor.numel() // _NUM_SAMPLES) | 1  # odd: not always in the same column
    with without_dispatch(), torch.no_grad():
        one: Tensor = tensor.detach()
        if one.is_contiguous():
            return one.view(-1)[::distance].clone()
        return one.take(torch.arange(0, one.numel(), distance, device=one.device))  # without a copy of the whole


def is_close(one: Tensor, other: Tensor | None) -> bool:
    """Whether two samples are equal up to rounding."""
    if other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    magnitudes = one.abs()[torch.isfinite(one)]
    scale = float(magnitudes.max()) if magnitudes.numel() else 0.0
    tolerance = _TOLERANCES.get(one.dtype, _TOLERANCE)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _are_equal(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether all are bitwise identical. Waits for the device once per dtype."""
    kinds: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for one, other in pairs:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        kinds.setdefault((one.dtype, one.device), []).append((one, other))
    return all(torch.equal(*map(torch.cat, zip(*group, strict=True))) for group in kinds.values())
