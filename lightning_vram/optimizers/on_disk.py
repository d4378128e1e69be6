"""Optimizer state in a file, streamed through a step.

``StatePlaces`` lays the file out and cuts a step into chunks, ``DiskPipeline`` reads and writes them in threads, and
``StreamedStates`` steps them for an optimizer.
"""

import os
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.core.host.disk import PAGE_BYTES, DiskFile, bytes_of
from lightning_vram.core.host.memory import OffloadError, empty_on_own_pages
from lightning_vram.optimizers.moment_forms import StateForm, StateLayout, find_layout, make_seeds
from lightning_vram.optimizers.step_loop import Part, step_parts
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
from lightning_vram.private_names.fsdp2 import local_shard, stored_shard

CHUNK_ELEMENTS = 2**22  # 16 MiB of each fp32 state
NUM_BUFFERS = 4
NUM_THREADS = 4
# Large parameters are cut at multiples of this: kernels treat the end of a vector differently from its middle, so other
# cuts could change bits.
PART_ELEMENTS = 4096
_SMALL_ALIGNMENT = 64  # enough for any dtype


class Extent(NamedTuple):
    """Bytes at ``position`` of the file and ``offset`` of a buffer: at the same byte of a page, for direct I/O."""

    position: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Span:
    """Weights ``start`` to ``stop`` of parameter ``index``, and the bytes of each of their states in the buffer."""

    index: int
    start: int
    stop: int
    slots: list[slice]


@dataclass(slots=True)
class Chunk:
    """A part of a large parameter, or several small ones."""

    spans: list[Span] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)
    num_elements: int = 0
    num_bytes: int = 0


class StatePlaces:
    """Positions of all states of parameters with ``sizes`` weights. Each state is contiguous."""

    def __init__(self, sizes: Sequence[int], layouts: Sequence[StateLayout]) -> None:
        self.sizes, self.layouts = tuple(sizes), tuple(layouts)
        positions, end = [], 0
        for size, layout in zip(sizes, layouts, strict=True):
            for num_bytes in layout.stored_bytes(size):
                # Small runs are not aligned to pages: that would waste memory.
                multiple = PAGE_BYTES if num_bytes >= PAGE_BYTES else _SMALL_ALIGNMENT
                positions.append(-(-end // multiple) * multiple)
                end = positions[-1] + num_bytes
        self.total_bytes = end
        spans = pairwise([*positions, end])
        # Of each state of each parameter: the position of its first byte, and that of the next state.
        self.blocks = [[next(spans) for _ in layout.elementwise] for layout in layouts]

    def buffer_bytes(self, chunk_elements: int) -> int:
        """Return the size of a buffer for any chunk of so many weights."""
        widest = max((sum(layout.stored_bytes(chunk_elements)) for layout in set(self.layouts)), default=0)
        lost_bytes = 2 * PAGE_BYTES * max(map(len, self.blocks), default=0)  # between runs
        return min(widest, self.total_bytes) + lost_bytes

    def plan(self, work: Sequence[int], chunk_elements: int) -> list[Chunk]:
        """Cut parameters, by index, into chunks that fit into ``buffer_bytes(chunk_elements)``; a multiple of 4096."""
        buffer_bytes = self.buffer_bytes(chunk_elements)
        chunks = [Chunk()]
        for index in work:
            start, size = 0, self.sizes[index]
            while True:
                num_free = chunk_elements - chunks[-1].num_elements
                stop = size if size - start <= num_free else start + num_free // PART_ELEMENTS * PART_ELEMENTS
                if (stop == start < size) or not self._add(chunks[-1], (index, start, stop), buffer_bytes):
                    chunks.append(Chunk())
                    continue
                start = stop
                if start == size:
                    break
        return [chunk for chunk in chunks if chunk.spans]

    def _add(self, chunk: Chunk, part: tuple[int, int, int], buffer_bytes: int) -> bool:
        """Add weights of a parameter to a chunk, if they fit into the buffer."""
        index, start, stop = part
        extents, end, slots = list(chunk.extents), chunk.num_bytes, []
        ends = map(self.layouts[index].stored_bytes, (start, stop))
        for (first, next_position), before, after in zip(self.blocks[index], *ends, strict=True):
            position, length = first + before, after - before
            if not extents or sum(extents[-1][:2]) != position:
                extents.append(Extent(position, 0, end + (position - end) % PAGE_BYTES))
            last = extents.pop()
            offset = last.offset + last.length
            slots.append(slice(offset, offset + length))
            # After the end of a parameter, the gap to the next state is unused: one run may include it.
            stop_position = next_position if stop == self.sizes[index] else position + length
            extents.append(Extent(last.position, stop_position - last.position, last.offset))
            end = last.offset + extents[-1].length
        if end > buffer_bytes and chunk.spans:
            return False
        chunk.spans.append(Span(index, start, stop, slots))
        chunk.extents, chunk.num_bytes = extents, end
        chunk.num_elements += stop - start
        return True


class DiskPipeline:
    """A ring of buffers, and the threads that fill and empty it.

    A buffer belongs to one at a time: a thread that reads, the caller who steps, a thread that writes and then reads.
    """

    def __init__(self, file: DiskFile) -> None:
        self._file = file
        self._buffer_bytes = 0
        self._buffers: list[Tensor] = []
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="lightning_vram nvme_path")

    def run(
        self, chunks: Sequence[Chunk], buffer_bytes: int, known: Container[int], step: Callable[[Chunk, Tensor], None]
    ) -> None:
        """Call ``step`` with each chunk and its buffer, in order, in this thread; read only ``known`` parameters."""
        if buffer_bytes > self._buffer_bytes:
            self._buffer_bytes, self._buffers = buffer_bytes, []
        while len(self._buffers) < min(NUM_BUFFERS, len(chunks)):
            with without_dispatch():
                self._buffers.append(empty_on_own_pages(max(self._buffer_bytes, 1), torch.uint8))
        reads = [chunk.extents if any(span.index in known for span in chunk.spans) else [] for chunk in chunks]
        ring = self._buffers[: len(chunks)]

        def move(buffer: Tensor, written: Sequence[Extent], read: Sequence[Extent]) -> "Future[None]":
            return self._threads.submit(_move, self._file, buffer, written, read)

        pending = deque(move(buffer, [], read) for buffer, read in zip(ring, reads, strict=False))
        try:
            for number, chunk in enumerate(chunks):
                buffer, following = ring[number % len(ring)], number + len(ring)
                self._await(pending.popleft())
                step(chunk, buffer)
                pending.append(move(buffer, chunk.extents, reads[following] if following < len(reads) else []))
            while pending:
                self._await(pending.popleft())
        except BaseException:
            wait(pending)  # or they would use buffers and file later
            for future in pending:
                self._await(future)  # the error of a disk is more important
            raise

    def close(self) -> None:
        """Close the file, and end the threads without waiting: this is a finalizer (see ``HostWorker.stop``)."""
        self._threads.shutdown(wait=False)
        self._buffers.clear()
        self._file.close()

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


@dataclass(frozen=True, slots=True)
class _Stored:  # a parameter whose states are in the file
    index: int  # in the file
    shown: State  # file-backed tensors of the optimizer's state


class StreamedStates:
    """Stores states of an elementwise optimizer in a temporary file, with file-backed tensors in its ``state``.

    :meth:`adopt` moves tensors that user code puts there to the disk. ``form`` of moments, where it is supported. A
    step takes the time to read and write all states: with AdamW 16 bytes per weight of this rank.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[nn.Parameter],
        folder: str | os.PathLike[str],
        form: StateForm | None = None,
    ) -> None:
        self._optimizer, self._wanted, self._form = optimizer, set(parameters), form
        self._stored: dict[nn.Parameter, _Stored] = {}
        self._places = StatePlaces([], [])
        self._why_over: str | None = None
        self._file = DiskFile(folder, "nvme_path", is_direct=True)
        self._pipeline = DiskPipeline(self._file)
        weakref.finalize(self, self._pipeline.close)  # idle: a running one keeps its owner alive
        self.load()

    def load(self) -> None:
        """Move the optimizer's states to the disk; on error nothing changes."""
        self._check()
        self._add_parameters()
        for parameter, stored in self._stored.items():
            state = self._optimizer.state.get(parameter, {})
            local_state = local_parts(parameter, state)
            for key, shown in stored.shown.items() if _has_begun(state) else ():
                if state.get(key) is not shown:
                    check_state(self._optimizer, parameter, key, local_state.get(key))
                    local_shard(shown).copy_(local_state[key])
                    state[key] = shown
        self._file.release()

    def adopt(self, members: Sequence[Member], wait: Callable[[], None]) -> None:
        """Add new ``members``, and move states that user code replaced to the disk, once other steps are over."""
        if not all(map(self._is_there, members)):
            wait()
            self.load()

    @torch.no_grad()
    def run(self, step_round: StepRound, members: Sequence[Member]) -> None:
        """Step ``members``, best in the order of the file."""
        self._check()
        step_round.scale(members)
        by_index = {self._stored[member.parameter].index: member for member in members}
        begun = {index for index, member in by_index.items() if _has_begun(member.local_state)}
        left: dict[int, State] = {}  # values per parameter after the step

        def step(chunk: Chunk, buffer: Tensor) -> None:
            slots = [_cut_slots(span, self._places.layouts[span.index], buffer) for span in chunk.spans]
            members = [by_index[span.index] for span in chunk.spans]
            states = [
                _copy_scalars(member.local_state, slot) | slot if _has_begun(member.local_state) else {}
                for member, slot in zip(members, slots, strict=True)
            ]
            seeds, forms = make_seeds(members, states), [self._places.layouts[span.index].form for span in chunk.spans]
            ranges = [slice(span.start, span.stop) for span in chunk.spans]
            parts = list(map(Part, members, ranges, states, forms, seeds))
            step_parts(step_round, parts)
            for span, part, slot in zip(chunk.spans, parts, slots, strict=True):
                left[span.index] = _keep_states(part, slot)

        self._file.release()  # pages that a checkpoint has read
        try:
            chunks = self._places.plan(list(by_index), CHUNK_ELEMENTS)
            self._pipeline.run(chunks, self._places.buffer_bytes(CHUNK_ELEMENTS), begun, step)
        except OffloadError as error:
            self._why_over = str(error)
            raise
        for index, member in by_index.items():
            publish_state(member, left[index])
            if index not in begun:
                member.state.update(self._stored[member.parameter].shown)

    def _add_parameters(self) -> None:
        """Add new parameters of the optimizer at the end of the file."""
        fresh: dict[nn.Parameter, StateLayout] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._stored or parameter not in self._wanted:
                    continue
                form = self._form if self._form is not None and self._form.holds(parameter) else None
                fresh[parameter] = replace(find_layout(self._optimizer, group, parameter.dtype), form=form)
        sizes = [stored_shard(parameter).numel() for parameter in fresh]
        places = StatePlaces([*self._places.sizes, *sizes], [*self._places.layouts, *fresh.values()])
        num_bytes = max(places.total_bytes, 1) - self._file.num_bytes  # an empty file cannot be mapped
        if num_bytes > 0:
            self._file.grow(num_bytes, "for the optimizer state", "or leave nvme_path out")
        self._places = places
        for parameter in fresh:
            index, shape = len(self._stored), stored_shard(parameter).shape
            shown = {key: as_sharded(view.view(shape), parameter, shape) for key, view in self._views(index).items()}
            self._stored[parameter] = _Stored(index, shown)

    def _views(self, index: int) -> dict[str, Tensor]:
        """Return flat states over pages of the file: current and writable between steps, first uninitialized."""
        size, layout, mapping = self._places.sizes[index], self._places.layouts[index], self._file.mapped()
        views = {}
        blocks = zip(layout.elementwise, self._places.blocks[index], layout.stored_bytes(size), strict=True)
        for (key, dtype), (position, _), count in blocks:
            memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # an empty tensor cannot lie anywhere
            if size:
                memory = torch.frombuffer(mapping, dtype=torch.uint8, count=count, offset=position)
            views[key] = layout.slot(key, dtype, memory, size)
        return views

    def _is_there(self, member: Member) -> bool:
        stored = self._stored.get(member.parameter)
        if stored is None:
            return member.parameter not in self._wanted
        return not _has_begun(member.state) or all(member.state.get(key) is one for key, one in stored.shown.items())

    def _check(self) -> None:
        if self._why_over is not None:
            raise OffloadError(self._why_over)


def _has_begun(state: State) -> bool:
    """Whether there is a state: the momentum buffer of SGD may be ``None``."""
    return any(value is not None for value in state.values())


def _copy_scalars(state: State, slots: Mapping[str, Tensor]) -> State:
    """Copy the values that a parameter has once, such as the step count, so that a failed step does not change them."""
    tensors = {key for key, value in state.items() if isinstance(value, Tensor)}
    scalars = {key: value for key, value in state.items() if key not in slots and not (key in tensors and value.dim())}
    return {key: value.detach().clone() if key in tensors else value for key, value in scalars.items()}


def _cut_slots(span: Span, layout: StateLayout, buffer: Tensor) -> dict[str, Tensor]:
    """Return the flat states of a span in ``buffer``."""
    places = zip(layout.elementwise, span.slots, strict=True)
    return {key: layout.slot(key, dtype, buffer[place], span.stop - span.start) for (key, dtype), place in places}


def _keep_states(part: Part, slots: Mapping[str, Tensor]) -> State:
    """Copy the states of a stepped part to its slots; return its other values."""
    states = part.stored | part.state
    for key in {**slots, **states}:
        value, slot = states.get(key), slots.get(key)
        fits = not isinstance(value, Tensor) or value.numel() == 1
        if slot is not None:
            fits = isinstance(value, Tensor) and (value.numel(), value.dtype) == (slot.numel(), slot.dtype)
        if not fits:
            left = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"nvme_path: no space is reserved for the optimizer state {key} = {left} of parameter "
                f"{part.member.number}. Set the options of the optimizer (amsgrad, momentum, ...) before training and "
                "do not change them."
            )
        if slot is not None and value is not slot:
            slot.copy_(states[key].reshape(-1))
    return {key: value for key, value in states.items() if key not in slots}
