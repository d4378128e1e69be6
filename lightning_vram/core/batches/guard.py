"""Keep a batch unchanged for a retry: a step may write into its batch."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_vram.core.batches.structure import take_apart
from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.private_names.torch.tensors import num_writes

_NUM_WATCHED = 2  # batches in which a step shows whether it writes into them


class BatchGuard:
    """Gives micro-batches to a step: copies if it writes into them, else views.

    The first batches are given as copies, and show which of the two it is. Writes past the version counter (``.data``,
    NumPy) are not detected.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._is_writing = False
        self._is_watching = False
        self._counts = True  # whether all tensors count their versions
        self._lent: list[tuple[Tensor, int]] = []
        self._own: list[tuple[Tensor, int]] = []

    def watch(self, batch: Any) -> None:
        """Begin a batch that may need a retry."""
        tensors = list(_iterate_tensors(batch))
        self._is_watching = True
        self._counts = not any(tensor.is_inference() for tensor in tensors)  # as evaluation loops make them
        self._own = [(tensor, num_writes(tensor)) for tensor in tensors if not tensor.is_inference()]
        self._lent = []

    def lend(self, part: Any) -> Any:
        """Return this part of the batch as the step gets it."""
        is_known = self._counts and not self._is_writing and self._num_seen >= _NUM_WATCHED
        if not self._is_watching or is_known:
            return part
        copied = _copy(part)
        tensors = _iterate_tensors(copied)
        self._lent += [(tensor, num_writes(tensor)) for tensor in tensors if not tensor.is_inference()]
        return copied

    def settle(self) -> None:
        """End a batch: learn from it."""
        self._num_seen += self._is_watching
        self._learn()
        self._is_watching, self._own = False, []

    def check(self) -> None:
        """Raise ``RuntimeError`` if the step wrote into the batch, which it had not done before."""
        self._learn()
        if any(num_writes(tensor) != version for tensor, version in self._own):
            raise RuntimeError(
                "MicroBatching cannot retry this batch: training_step modified it in place, unlike the first "
                "batches. Write into a copy, or give a fixed size."
            )

    def _learn(self) -> None:
        self._is_writing |= any(num_writes(tensor) != version for tensor, version in self._lent)
        self._lent = []


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif (parts := take_apart(value)) is not None:
        for part in parts.values:
            yield from _iterate_tensors(part)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, PackedSequence):
        return value._replace(data=value.data.clone())
    parts = take_apart(value)
    try:
        return value if parts is None else parts.build([_copy(part) for part in parts.values])
    except Exception as error:  # a container of the user's that cannot be built anew is lent itself
        if is_out_of_memory(error):
            raise
        return value


def hand_back(batch: Any, lent: Any) -> None:
    """Repeat in ``batch`` what a step added to, or removed from, the dict or list that it got instead."""
    if lent is batch:
        return
    if isinstance(batch, dict) and isinstance(lent, dict):
        batch.clear()
        batch.update(lent)
    elif isinstance(batch, list) and isinstance(lent, list):
        batch[:] = lent
