"""Parts of a parameter with states of their own, as an optimizer sees them: cut out of a buffer and put back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_vram.optimizers.on_disk.chunks import Span
from lightning_vram.optimizers.on_disk.layouts import StateLayout
from lightning_vram.optimizers.stepping import State


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter that is stepped at once.

    Attributes:
        index: Which parameter.
        start: Its first weight, counted in the flat parameter.
        stop: One past its last.
        states: The state of a parameter that has just these weights: flat tensors on a buffer, ``[stop - start]``,
            and copies of what is kept once for a parameter. Empty if the parameter has no state yet. What is in it
            after the step is kept.
    """

    index: int
    start: int
    stop: int
    states: State


Step = Callable[[Sequence[Piece]], None]


def cut_slots(span: Span, layout: StateLayout, buffer: Tensor) -> dict[str, Tensor]:
    """Return the states of a span, flat tensors on ``buffer``."""
    size = span.stop - span.start
    places = zip(layout.elementwise, span.offsets, _lengths(span, layout), strict=True)
    return {
        key: layout.slot(key, dtype, buffer[offset : offset + length], size) for (key, dtype), offset, length in places
    }


def keep_states(piece: Piece, slots: Mapping[str, Tensor]) -> State:
    """Let the slots hold what a step has left in a piece; return what is kept once for a parameter.

    Raises:
        ValueError: If the step left other states than there are slots for.
    """
    states = piece.states
    for key, slot in slots.items():
        left = states.get(key)
        if left is slot:
            continue
        if not isinstance(left, Tensor) or left.numel() != slot.numel() or left.dtype != slot.dtype:
            raise _mismatch(piece, key, left)
        slot.copy_(left.reshape(-1))
    scalars = {key: value for key, value in states.items() if key not in slots}
    for key, value in scalars.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise _mismatch(piece, key, value)
    return scalars


def copy_scalars(scalars: Mapping[str, Any]) -> State:
    """Copy what is kept once for a parameter, so that a step on the copy does not show."""
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in scalars.items()}


def _lengths(span: Span, layout: StateLayout) -> list[int]:
    """Bytes of each state of a span."""
    ends = zip(layout.kept_bytes(span.start), layout.kept_bytes(span.stop), strict=True)
    return [stop - start for start, stop in ends]


def _mismatch(piece: Piece, key: str, value: object) -> ValueError:
    left = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return ValueError(
        f"nvme_path: the optimizer left {key} = {left} as a state of parameter {piece.index}, which there was no room "
        "made for; set its options (amsgrad, momentum, ...) before training and leave them."
    )
