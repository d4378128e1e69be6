"""Optimizer state in a file, streamed through a step.

``StatePlaces`` lays the file out and cuts a step into chunks, ``DiskPipeline`` reads and writes them in threads,
``DiskStates`` steps them, and ``StreamedStates`` connects all of it with an optimizer.
"""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.core.host.disk import PAGE_BYTES, DiskFile, bytes_of
from lightning_vram.core.host.memory import OffloadError
from lightning_vram.optimizers.moment_forms import (
    StateForm,
    StateLayout,
    find_layout,
    make_seeds,
)
from lightning_vram.optimizers.step_loop import Part, scale_members, step_parts
from lightning_vram.optimizers.step_round import (
    Member,
    State,
    StepRound,
    as_sharded,
    check_state,
    local_parts,
    publish_state,
)
from lightning_vram.private_names.dispatcher import without_dispatch
from lightning_vram.private_names.fsdp2 import local_shard

CHUNK_ELEMENTS = 2**22  # 16 MiB of each fp32 state
# Large parameters are cut at multiples of this: kernels treat the end of a vector differently from its middle, so other
# cuts could change bits.
PART_ELEMENTS = 4096
_SMALL_ALIGNMENT = 64  # enough for any dtype


@dataclass(frozen=True, slots=True)
class Block:
    """One state of one parameter in the file."""

    layout: StateLayout
    number: int  # which of its tensors
    position: int  # of its first byte
    next_position: int  # of the next block

    def bytes_of(self, count: int) -> int:
        """Return the bytes of the first ``count`` weights."""
        return self.layout.stored_bytes(count)[self.number]


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes at ``position`` of the file and ``offset`` of a buffer: at the same byte of a page, for direct I/O."""

    position: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Span:
    """Weights ``start`` to ``stop`` of parameter ``index``, and where each of their states is in the buffer."""

    index: int
    start: int
    stop: int
    offsets: tuple[int, ...]


@dataclass(slots=True)
class Chunk:
    """A part of a large parameter, or several small ones."""

    spans: list[Span]
    extents: list[Extent]
    num_elements: int = 0
    num_bytes: int = 0


class StatePlaces:
    """Positions of all states of parameters with ``sizes`` weights. Each state is contiguous."""

    def __init__(self, sizes: Sequence[int], layouts: Sequence[StateLayout]) -> None:
        self.sizes = tuple(sizes)
        self._layouts = set(layouts)
        positions, end = [], 0
        for size, layout in zip(sizes, layouts, strict=True):
            for num_bytes in layout.stored_bytes(size):
                # Small runs are not aligned to pages: that would waste memory.
                multiple = PAGE_BYTES if num_bytes >= PAGE_BYTES else _SMALL_ALIGNMENT
                positions.append(-(-end // multiple) * multiple)
                end = positions[-1] + num_bytes
        self.total_bytes = end
        spans = pairwise([*positions, end])
        self.blocks = [
            [Block(layout, number, *next(spans)) for number in range(len(layout.elementwise))] for layout in layouts
        ]

    def buffer_bytes(self, chunk_elements: int) -> int:
        """Return the size of a buffer for any chunk of so many weights."""
        widest = max((sum(layout.stored_bytes(chunk_elements)) for layout in self._layouts), default=0)
        lost_bytes = 2 * PAGE_BYTES * max(map(len, self.blocks), default=0)  # between runs
        return min(widest, self.total_bytes) + lost_bytes

    def plan(self, work: Sequence[int], chunk_elements: int) -> list[Chunk]:
        """Cut parameters, by index, into chunks that fit into ``buffer_bytes(chunk_elements)``; a multiple of 4096."""
        buffer_bytes = self.buffer_bytes(chunk_elements)
        chunks = [Chunk([], [])]
        for index in work:
            start, size = 0, self.sizes[index]
            while True:
                num_free = chunk_elements - chunks[-1].num_elements
                stop = size if size - start <= num_free else start + num_free // PART_ELEMENTS * PART_ELEMENTS
                if (stop == start < size) or not self._add(chunks[-1], (index, start, stop), buffer_bytes):
                    chunks.append(Chunk([], []))
                    continue
                start = stop
                if start == size:
                    break
        return [chunk for chunk in chunks if chunk.spans]

    def _add(self, chunk: Chunk, part: tuple[int, int, int], buffer_bytes: int) -> bool:
        """Add weights of a parameter to a chunk, if they fit into the buffer."""
        index, start, stop = part
        extents, end, offsets = list(chunk.extents), chunk.num_bytes, []
        for block in self.blocks[index]:
            before = block.bytes_of(start)
            position, length = block.position + before, block.bytes_of(stop) - before
            last = extents[-1] if extents else None
            if last is not None and last.position + last.length == position:
                offsets.append(last.offset + last.length)
                extents[-1] = Extent(last.position, last.length + length, last.offset)
            else:
                offsets.append(end + (position - end) % PAGE_BYTES)
                extents.append(Extent(position, length, offsets[-1]))
            if stop == self.sizes[index]:  # the gap to the next block is unused: one run may include it
                last = extents[-1]
                extents[-1] = Extent(last.position, block.next_position - last.position, last.offset)
            end = extents[-1].offset + extents[-1].length
        if end > buffer_bytes and chunk.spans:
            return False
        chunk.spans.append(Span(index, start, stop, tuple(offsets)))
        chunk.extents, chunk.num_bytes = extents, end
        chunk.num_elements += stop - start
        return True


class DiskPipeline:
    """A ring of at least two buffers, and the threads that fill and empty it.

    A buffer belongs to one at a time: a thread that reads, the caller who steps, a thread that writes and then reads.
    """

    def __init__(self, file: DiskFile, num_buffers: int, num_threads: int) -> None:
        self._file = file
        self._buffer_bytes = 0
        self._num_buffers = num_buffers
        self._buffers: list[Tensor] = []
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lightning_vram nvme_path")

    def enlarge(self, buffer_bytes: int) -> None:
        """Set the size of the buffers."""
        if buffer_bytes > self._buffer_bytes:
            self._buffer_bytes, self._buffers = buffer_bytes, []

    @property
    def ring_bytes(self) -> int:
        """Host memory of the ring. A first step also creates the states of one chunk at a time."""
        return len(self._buffers) * self._buffer_bytes

    def run(self, chunks: Sequence[Chunk], known: Container[int], step: Callable[[Chunk, Tensor], None]) -> None:
        """Call ``step`` with each chunk and its buffer, in order, in this thread; read only ``known`` parameters."""
        while len(self._buffers) < min(self._num_buffers, len(chunks)):
            self._buffers.append(_make_buffer(self._buffer_bytes))
        reads = [chunk.extents if any(span.index in known for span in chunk.spans) else [] for chunk in chunks]
        ring = self._buffers[: len(chunks)]
        pending = deque(self._submit(buffer, [], read) for buffer, read in zip(ring, reads, strict=False))
        try:
            for number, chunk in enumerate(chunks):
                buffer, following = ring[number % len(ring)], number + len(ring)
                self._await(pending.popleft())
                step(chunk, buffer)
                pending.append(self._submit(buffer, chunk.extents, reads[following] if following < len(reads) else []))
            while pending:
                self._await(pending.popleft())
        except BaseException:
            wait(pending)  # or they would use buffers and file later
            for future in pending:
                self._await(future)  # the error of a disk is more important
            raise

    def close(self) -> None:
        """End the threads without waiting: this is a finalizer (see ``HostWorker.stop``)."""
        self._threads.shutdown(wait=False)
        self._buffers.clear()

    def _submit(self, buffer: Tensor, written: Sequence[Extent], read: Sequence[Extent]) -> "Future[None]":
        """Write a buffer, and read the next chunk into it, in a thread."""
        return self._threads.submit(_move, self._file, buffer, written, read)

    def _await(self, future: "Future[None]") -> None:
        try:
            future.result()
        except Exception as error:
            raise OffloadError(
                f"{self._file.name}: optimizer state could not be written or read ({error}). It is lost: "
                "resume from a checkpoint, with nvme_path on another disk or without it."
            ) from error


def _move(file: DiskFile, buffer: Tensor, written: Sequence[Extent], read: Sequence[Extent]) -> None:
    for extent in written:
        file.write(bytes_of(buffer, extent.offset, extent.length), extent.position)
    for extent in read:
        file.read(bytes_of(buffer, extent.offset, extent.length), extent.position)


def _make_buffer(num_bytes: int) -> Tensor:
    """Return page-aligned memory."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        # If a process forks during direct I/O, as for a data loader, only the child might get the bytes.
        memory.madvise(mmap.MADV_DONTFORK)
    with without_dispatch():
        return torch.frombuffer(memory, dtype=torch.uint8)


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
        self._pipeline.enlarge(places.buffer_bytes(self._chunk_elements))

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
        if len(set(work)) < len(work):
            raise ValueError("work must not name a parameter twice.")
        if self._planned[0] != tuple(work):
            self._planned = (tuple(work), self._places.plan(work, self._chunk_elements))
        left: dict[int, State] = {}

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
            self._pipeline.run(self._planned[1], known, step_chunk)
        except OffloadError as error:
            self._why_over = str(error)
            raise
        return left

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
        "options of the optimizer (amsgrad, momentum, ...) before training and do not change them."
    )


class StreamedStates:
    """Stores states of an elementwise optimizer in a file, with file-backed tensors in its ``state``.

    :meth:`adopt` moves tensors that user code puts there to the disk. ``form`` of moments, where it is supported.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[nn.Parameter],
        folder: str | os.PathLike[str],
        form: StateForm | None = None,
    ) -> None:
        self._optimizer, self._wanted, self._form = optimizer, set(parameters), form
        self._index: dict[nn.Parameter, int] = {}
        self._forms: list[StateForm | None] = []
        self._shown: list[State] = []  # file-backed tensors of the optimizer's state
        self._disk = DiskStates(folder)
        self.load()

    def load(self) -> None:
        """Move the optimizer's states to the disk."""
        form = self._form
        fresh = {
            parameter: replace(
                find_layout(self._optimizer, group, parameter.dtype),
                form=form if form is not None and form.holds(parameter) else None,
            )
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter in self._wanted and parameter not in self._index
        }
        self._disk.add([local_shard(parameter).numel() for parameter in fresh], list(fresh.values()))
        self._forms += [layout.form for layout in fresh.values()]
        for parameter in fresh:
            index = self._index[parameter] = len(self._index)
            shape = local_shard(parameter).shape
            views = self._disk.views(index).items()
            self._shown.append({key: as_sharded(view.view(shape), parameter, shape) for key, view in views})
        for parameter, index in self._index.items():
            state = self._optimizer.state.get(parameter, {})
            local_state = local_parts(parameter, state)
            for key, shown in self._shown[index].items() if _has_begun(state) else ():
                if state.get(key) is not shown:
                    check_state(self._optimizer, parameter, key, local_state.get(key))
                    local_shard(shown).copy_(local_state[key])
                    state[key] = shown
        self._disk.release()

    def adopt(self, members: Sequence[Member], wait: Callable[[], None]) -> None:
        """Add new ``members``, and move states that user code replaced to the disk, once other steps are over."""
        if not all(map(self._is_there, members)):
            wait()
            self.load()

    def _is_there(self, member: Member) -> bool:
        if member.parameter not in self._index:
            return member.parameter not in self._wanted
        shown = self._shown[self._index[member.parameter]].items()
        return not _has_begun(member.state) or all(member.state.get(key) is value for key, value in shown)

    def run(self, step_round: StepRound, members: Sequence[Member]) -> None:
        """Step ``members``."""
        scale_members(step_round, members)
        by_index = {self._index[member.parameter]: member for member in members}

        def step(pieces: Sequence[Piece]) -> None:
            members = [by_index[piece.index] for piece in pieces]
            seeds = make_seeds(members, [piece.states for piece in pieces])
            parts = [
                Part(member, slice(piece.start, piece.stop), piece.states, self._forms[piece.index], seed)
                for piece, member, seed in zip(pieces, members, seeds, strict=True)
            ]
            step_parts(step_round, parts)
            for piece, part in zip(pieces, parts, strict=True):
                piece.states.update(part.state)

        self._disk.release()  # pages that a checkpoint has read
        known = {
            index: {
                key: value
                for key, value in member.local_state.items()
                if key not in self._shown[index] and not (isinstance(value, Tensor) and value.dim())
            }
            for index, member in by_index.items()
            if _has_begun(member.local_state)
        }
        for index, scalars in self._disk.stream(list(by_index), step, known).items():
            publish_state(by_index[index], scalars)
            if index not in known:
                by_index[index].state.update(self._shown[index])


def _has_begun(state: State) -> bool:
    """Whether there is a state: the momentum buffer of SGD may be ``None``."""
    return any(value is not None for value in state.values())
