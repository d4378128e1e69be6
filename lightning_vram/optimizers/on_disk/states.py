"""Optimizer states on disk, for hosts that are short of memory: read ahead, stepped chunk by chunk, written behind.

The host then keeps a few buffers instead of eight bytes for each weight. A step takes as long as the disk needs to
read all states and write them again: with AdamW 16 bytes for each weight that this rank steps. The states live in a
file that vanishes with the process: they are no checkpoint.
"""

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.host.arena import OffloadError
from lightning_vram.core.host.disk_file import DiskFile
from lightning_vram.optimizers.on_disk.chunks import PART_ELEMENTS, Chunk, StatePlaces
from lightning_vram.optimizers.on_disk.layouts import StateLayout
from lightning_vram.optimizers.on_disk.pieces import Piece, Step, copy_scalars, cut_slots, keep_states
from lightning_vram.optimizers.on_disk.pipeline import DiskPipeline
from lightning_vram.optimizers.stepping import State

CHUNK_ELEMENTS = 2**22  # 16 MiB of each fp32 state


class DiskStates:
    """States of parameters in a file in ``folder``, as long as this object is not closed.

    Not for several threads at a time.

    Args:
        folder: On a local disk that is fast: an NVMe drive, not a network file system.
        sizes: Number of weights of each parameter.
        layouts: What is kept for each of them, see :func:`~lightning_vram.optimizers.on_disk.layouts.find_layout`.
        chunk_elements: Most weights that are stepped at once; a multiple of 4096.
        num_buffers: Chunks in memory, at least 2.
        num_threads: Reads and writes at a time.

    Raises:
        ValueError: If ``folder`` is no folder, or a number is not allowed.
        OffloadError: If no file can be made there, or the disk is too small.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        sizes: Sequence[int],
        layouts: Sequence[StateLayout],
        *,
        chunk_elements: int = CHUNK_ELEMENTS,
        num_buffers: int = 4,
        num_threads: int = 4,
    ) -> None:
        if chunk_elements < 1 or chunk_elements % PART_ELEMENTS:
            raise ValueError(f"chunk_elements must be a positive multiple of {PART_ELEMENTS}, got {chunk_elements}.")
        if num_buffers < 2:
            raise ValueError(f"num_buffers must be at least 2, got {num_buffers}.")
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}.")
        self._layouts = tuple(layouts)
        self._places = StatePlaces(sizes, layouts)
        self._chunk_elements = chunk_elements
        self._scalars: dict[int, State] = {}  # of those that have a state
        self._planned: tuple[tuple[int, ...], list[Chunk]] = ((), [])
        self._why_over: str | None = None
        self._file = DiskFile(folder, "nvme_path", is_direct=True)
        try:  # an empty file cannot be mapped
            self._file.grow(max(self.total_bytes, 1), "for the states of the optimizer", "or leave nvme_path out")
        except BaseException:
            self._file.close()
            raise
        self._pipeline = DiskPipeline(self._file, self._places.buffer_bytes(chunk_elements), num_buffers, num_threads)
        self._finalizer = weakref.finalize(self, _close, self._pipeline, self._file)

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return self._places.total_bytes

    @property
    def ring_bytes(self) -> int:
        """Host memory taken. States that a first step makes are on top, one chunk of them at a time."""
        return self._pipeline.ring_bytes

    def scalars(self, index: int) -> State:
        """Return a copy of what is kept once for a parameter, its count of steps and the like; empty at first."""
        return copy_scalars(self._scalars.get(index, {}))

    def views(self, index: int) -> dict[str, Tensor]:
        """Return the states of a parameter that lie in the file.

        Returns:
            Flat tensors over pages of the file. They show every step that is over, and can be written to between
            steps. For a parameter without state they hold anything.

        Raises:
            OffloadError: If this is closed.
        """
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

    def load(self, index: int, state: Mapping[str, Any]) -> None:
        """Copy the state of a parameter from elsewhere.

        Args:
            index: Which parameter.
            state: As its optimizer would have it, in any shape. Empty: the parameter begins anew.

        Raises:
            ValueError: If it is not the state of such a parameter; nothing is changed then.
            OffloadError: If this is closed.
        """
        views = self.views(index)
        for key, view in views.items() if state else ():
            value = state.get(key)
            if not isinstance(value, Tensor) or value.numel() != view.numel():
                found = f"a tensor of {value.numel()}" if isinstance(value, Tensor) else repr(value)
                wanted = f"must have {key!r}, a tensor of {view.numel()} numbers"
                raise ValueError(f"The state of parameter {index} {wanted}; got {found}.")
        self._scalars.pop(index, None)
        if state:
            for key, view in views.items():
                view.copy_(state[key].detach().reshape(-1))
            self._scalars[index] = copy_scalars({key: value for key, value in state.items() if key not in views})

    def release(self) -> None:
        """Give back the pages that were touched through ``views``; for after they were saved or loaded."""
        self._file.release()

    @torch.no_grad()
    def stream(self, work: Sequence[int], step: Step) -> None:
        """Step parameters.

        Args:
            work: Which, and in which order; that in which they were given is read in the longest runs.
            step: Steps all pieces it gets, in the calling thread. Each of them may have states of its own: what is
                kept once for a parameter counts when its last piece was stepped.

        Raises:
            ValueError: If a parameter is in ``work`` twice, or ``step`` leaves states that there is no room for.
            OffloadError: If the disk fails; the states are lost then.
        """
        self._check()
        chunks, known = self._plan(tuple(work)), self._scalars.keys() & set(work)

        def step_chunk(chunk: Chunk, buffer: Tensor) -> None:
            slots = [cut_slots(span, self._layouts[span.index], buffer) for span in chunk.spans]
            pieces = [
                Piece(span.index, span.start, span.stop, self.scalars(span.index) | slot if span.index in known else {})
                for span, slot in zip(chunk.spans, slots, strict=True)
            ]
            step(pieces)
            for piece, slot in zip(pieces, slots, strict=True):
                scalars = keep_states(piece, slot)
                if piece.stop == self._places.sizes[piece.index]:
                    self._scalars[piece.index] = scalars

        try:
            self._pipeline.run(chunks, known, step_chunk)
        except OffloadError as error:
            self._why_over = str(error)
            raise

    def close(self) -> None:
        """Delete the file and give the memory back."""
        self._why_over = f"{self._file.name}: closed already, the states there are gone."
        self._pipeline.close()
        self._finalizer()

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
    pipeline.close(wait=False)  # nothing is under way: who has the pipeline at work has us, too
    file.close()
