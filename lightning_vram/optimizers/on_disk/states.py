"""Optimizer states in a temporary file: read ahead, stepped chunk by chunk, written behind."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.host.arena import OffloadError
from lightning_vram.core.host.disk_file import DiskFile
from lightning_vram.optimizers.on_disk.chunks import Chunk, Span, StatePlaces
from lightning_vram.optimizers.on_disk.layouts import StateLayout
from lightning_vram.optimizers.on_disk.pipeline import DiskPipeline
from lightning_vram.optimizers.stepping.step_round import State

CHUNK_ELEMENTS = 2**22  # 16 MiB of each fp32 state


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter."""

    index: int  # of the parameter
    start: int  # its first weight, counted in the flat parameter
    stop: int  # one past its last
    # Flat tensors on a buffer, [stop - start], and copies of the values that a parameter has once. Empty if the
    # parameter has no state yet. The values that the step leaves here are stored.
    states: State


Step = Callable[[Sequence[Piece]], None]


class DiskStates:
    """States of parameters in a temporary file in ``folder``, for one thread at a time.

    A step takes the time to read and write all states: with AdamW 16 bytes per weight of this rank.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        chunk_elements: int = CHUNK_ELEMENTS,
        num_buffers: int = 4,
        num_threads: int = 4,
    ) -> None:
        self._layouts: list[StateLayout] = []
        self._places = StatePlaces([], [])
        self._chunk_elements = chunk_elements
        self._planned: tuple[tuple[int, ...], list[Chunk]] = ((), [])
        self._why_over: str | None = None
        self._file = DiskFile(folder, "nvme_path", is_direct=True)
        self._pipeline = DiskPipeline(self._file, num_buffers, num_threads)
        weakref.finalize(self, _close, self._pipeline, self._file)

    def add(self, sizes: Sequence[int], layouts: Sequence[StateLayout]) -> None:
        """Add parameters with ``sizes`` weights at the end of the file; on error nothing changes."""
        self._check()
        layouts = [*self._layouts, *layouts]
        places = StatePlaces([*self._places.sizes, *sizes], layouts)
        num_bytes = max(places.total_bytes, 1) - self._file.num_bytes  # an empty file cannot be mapped
        if num_bytes > 0:
            self._file.grow(num_bytes, "for the optimizer state", "or leave nvme_path out")
        self._layouts, self._places, self._planned = layouts, places, ((), [])
        self._pipeline.make_room(places.buffer_bytes(self._chunk_elements))

    def views(self, index: int) -> dict[str, Tensor]:
        """Return flat states over pages of the file: current and writable between steps, first uninitialized."""
        self._check()
        size, mapping = self._places.sizes[index], self._file.mapped()
        layout = self._layouts[index]
        views = {}
        for (key, dtype), block in zip(layout.elementwise, self._places.blocks[index], strict=True):
            if size:
                memory = torch.frombuffer(mapping, dtype=torch.uint8, count=block.bytes_of(size), offset=block.position)
            else:  # an empty tensor cannot lie anywhere
                memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            views[key] = layout.slot(key, dtype, memory, size)
        return views

    def release(self) -> None:
        """Free the pages that were touched through ``views``."""
        self._file.release()

    @torch.no_grad()
    def stream(self, work: Sequence[int], step: Step, known: Mapping[int, State]) -> dict[int, State]:
        """Step parameters, best in the order of :meth:`add`; return their values that are no elementwise states.

        ``known`` has these values of parameters with a state. ``step`` may replace states of its pieces.
        """
        self._check()
        chunks, left = self._plan(tuple(work)), dict[int, State]()

        def step_chunk(chunk: Chunk, buffer: Tensor) -> None:
            slots = [_cut_slots(span, self._layouts[span.index], buffer) for span in chunk.spans]
            pieces = [
                Piece(i := span.index, span.start, span.stop, _copy_scalars(known[i]) | slot if i in known else {})
                for span, slot in zip(chunk.spans, slots, strict=True)
            ]
            step(pieces)
            for piece, slot in zip(pieces, slots, strict=True):
                scalars = _keep_states(piece, slot)
                if piece.stop == self._places.sizes[piece.index]:
                    left[piece.index] = scalars

        try:
            self._pipeline.run(chunks, known, step_chunk)
        except OffloadError as error:
            self._why_over = str(error)
            raise
        return left

    def _plan(self, work: tuple[int, ...]) -> list[Chunk]:
        if len(set(work)) < len(work):
            raise ValueError("work must not name a parameter twice.")
        if self._planned[0] != work:
            self._planned = (work, self._places.plan(work, self._chunk_elements))
        return self._planned[1]

    def _check(self) -> None:
        if self._why_over is not None:
            raise OffloadError(self._why_over)


def _close(pipeline: DiskPipeline, file: DiskFile) -> None:
    pipeline.close()  # idle: a running pipeline keeps its owner alive
    file.close()


def _cut_slots(span: Span, layout: StateLayout, buffer: Tensor) -> dict[str, Tensor]:
    """Return the flat states of a span in ``buffer``."""
    size = span.stop - span.start
    ends = zip(layout.stored_bytes(span.start), layout.stored_bytes(span.stop), strict=True)
    places = zip(layout.elementwise, span.offsets, (stop - start for start, stop in ends), strict=True)
    return {
        key: layout.slot(key, dtype, buffer[offset : offset + length], size) for (key, dtype), offset, length in places
    }


def _keep_states(piece: Piece, slots: Mapping[str, Tensor]) -> State:
    """Copy the states of a stepped piece to its slots; return its other values."""
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


def _copy_scalars(scalars: Mapping[str, Any]) -> State:
    """Copy values, so that a failed step does not change them."""
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in scalars.items()}


def _mismatch(piece: Piece, key: str, value: object) -> ValueError:
    left = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return ValueError(
        f"nvme_path: no space is reserved for the optimizer state {key} = {left} of parameter {piece.index}. Set the "
        "options "
        "of the optimizer (amsgrad, momentum, ...) before training and do not change them."
    )
