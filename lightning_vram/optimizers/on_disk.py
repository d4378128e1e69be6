"""Optimizer state in a file, streamed through a step: threads read and write it, some weights at a time."""

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import chain
from mmap import mmap
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.core.host.disk import DiskFile, bytes_of
from lightning_vram.core.host.memory import ALIGNMENT_BYTES, OffloadError, cut_parts
from lightning_vram.optimizers import step_round as rounds
from lightning_vram.optimizers.moment_forms import StateForm, StateLayout, find_layout, make_seeds
from lightning_vram.optimizers.step_loop import Part, step_parts
from lightning_vram.private_names.dispatcher import without_dispatch
from lightning_vram.private_names.fsdp2 import local_shard, stored_shard

CHUNK_ELEMENTS = 2**22  # of weights that are stepped at once: 16 MiB of each fp32 state
NUM_BUFFERS = 4
NUM_THREADS = 4


class _Stored(NamedTuple):
    """A parameter whose states are in the file."""

    layout: StateLayout
    positions: list[int]  # in the file, of each state with one number per weight
    shown: rounds.State  # file-backed tensors of the optimizer's state


class _Span(NamedTuple):
    """Some weights of a parameter in a step."""

    member: rounds.Member
    range: slice  # of its flat weights
    layout: StateLayout
    slots: list[tuple[slice, int]]  # bytes of a buffer, and their position in the file, of each state

    def cut(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the flat states in ``buffer``."""
        count, slots = self.range.stop - self.range.start, zip(self.layout.elementwise, self.slots, strict=True)
        return {key: self.layout.slot(key, dtype, buffer[place], count) for (key, dtype), (place, _) in slots}


class StreamedStates:
    """Stores states of an elementwise optimizer in a temporary file, with file-backed tensors in its ``state``.

    :meth:`adopt` moves tensors that user code puts there to the disk. ``form`` of moments, where it is supported. A
    step takes the time to read and write all states: with AdamW 16 bytes per weight of this rank. A buffer belongs to
    one at a time: a thread that reads, the caller who steps, a thread that writes and then reads.
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
        self._why_over: str | None = None
        self._file = DiskFile(folder, "nvme_path")
        self._buffer_bytes = 0
        self._buffers: list[Tensor] = []
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="lightning_vram nvme_path")
        weakref.finalize(self, _close, self._threads, self._file)  # idle: a running step keeps its owner alive
        self.load()

    def load(self) -> None:
        """Move the optimizer's states to the disk; on error nothing changes."""
        self._check()
        self._add_parameters()
        for parameter, stored in self._stored.items():
            state = self._optimizer.state.get(parameter, {})
            local_state = rounds.local_parts(parameter, state)
            for key, shown in stored.shown.items() if _has_begun(state) else ():
                if state.get(key) is not shown:
                    rounds.check_state(self._optimizer, parameter, key, local_state.get(key))
                    local_shard(shown).copy_(local_state[key])
                    state[key] = shown

    def adopt(self, members: Sequence[rounds.Member], wait: Callable[[], None]) -> None:
        """Add new ``members``, and move states that user code replaced to the disk, once other steps are over."""
        if not all(map(self._is_there, members)):
            wait()
            self.load()

    @torch.no_grad()
    def run(self, step_round: rounds.StepRound, members: Sequence[rounds.Member]) -> None:
        """Step ``members``."""
        self._check()
        step_round.scale(members)
        left: dict[rounds.Member, rounds.State] = {}  # values per parameter after the step
        self._stream(self._cut(members), lambda spans, buffer: left.update(_step(step_round, spans, buffer)))
        for member in members:
            is_first = not _has_begun(member.local_state)
            rounds.publish_state(member, left[member])
            if is_first:
                member.state.update(self._stored[member.parameter].shown)

    def _cut(self, members: Iterable[rounds.Member]) -> list[list[_Span]]:
        """Cut a step into parts of large parameters, and several small ones, that fit into a buffer."""
        chunks: list[list[_Span]] = []
        num_free, end = -1, 0
        for member in members:
            layout, positions, _ = self._stored[member.parameter]
            for start, stop in cut_parts(0, member.shard.numel(), CHUNK_ELEMENTS):
                if stop - start > num_free:
                    chunks.append([])
                    num_free, end = CHUNK_ELEMENTS, 0
                slots = []
                for position, before, after in zip(positions, *map(layout.stored_bytes, (start, stop)), strict=True):
                    slots.append((slice(end, end + after - before), position + before))
                    end = _aligned(slots[-1][0].stop)
                chunks[-1].append(_Span(member, slice(start, stop), layout, slots))
                num_free -= stop - start
        return chunks

    def _stream(self, chunks: Sequence[Sequence[_Span]], step: Callable[[Sequence[_Span], Tensor], None]) -> None:
        """Call ``step`` with each chunk and its buffer, in order, in this thread."""
        ring = self._make_buffers(chunks)

        def move(buffer: Tensor, written: Sequence[_Span], number: int) -> "Future[None]":
            spans = chunks[number] if number < len(chunks) else ()
            read = [span for span in spans if _has_begun(span.member.local_state)]
            return self._threads.submit(_move, self._file, buffer, written, read)

        pending = deque(move(buffer, (), number) for number, buffer in enumerate(ring))
        try:
            for number, chunk in enumerate(chunks):
                buffer = ring[number % len(ring)]
                self._await(pending.popleft())
                step(chunk, buffer)
                pending.append(move(buffer, chunk, number + len(ring)))
            while pending:
                self._await(pending.popleft())
        except BaseException:
            wait(pending)  # or they would use buffers and file later
            for future in pending:
                self._await(future)  # the error of a disk is more important
            raise

    def _make_buffers(self, chunks: Sequence[Sequence[_Span]]) -> list[Tensor]:
        """Return a buffer for each of the first chunks, large enough for any."""
        needed = max((place.stop for chunk in chunks for span in chunk for place, _ in span.slots), default=0)
        if needed > self._buffer_bytes:
            self._buffer_bytes, self._buffers = needed, []
        while len(self._buffers) < min(NUM_BUFFERS, len(chunks)):
            with without_dispatch():  # who counts memory counts that of the device
                self._buffers.append(torch.empty(self._buffer_bytes, dtype=torch.uint8, device="cpu"))
        return self._buffers[: len(chunks)]

    def _await(self, future: "Future[None]") -> None:
        try:
            future.result()
        except Exception as error:
            self._why_over = (
                f"{self._file.name}: optimizer state could not be written or read ({error}). It is lost: "
                "resume from a checkpoint, with nvme_path on another disk or without it."
            )
            raise OffloadError(self._why_over) from error

    def _add_parameters(self) -> None:
        """Add new parameters of the optimizer at the end of the file; their states are not initialized."""
        fresh: dict[nn.Parameter, tuple[StateLayout, list[int]]] = {}
        end = self._file.num_bytes
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._stored or parameter not in self._wanted:
                    continue
                form = self._form if self._form is not None and self._form.holds(parameter) else None
                layout = replace(find_layout(self._optimizer, group, parameter.dtype), form=form)
                positions: list[int] = []
                for num_bytes in layout.stored_bytes(stored_shard(parameter).numel()):
                    positions.append(end)
                    end = _aligned(end + num_bytes)
                fresh[parameter] = layout, positions
        if end > self._file.num_bytes:
            self._file.grow(end - self._file.num_bytes, "for the optimizer state", "or leave nvme_path out")
        pages = self._file.map() if fresh and end else None  # an empty file cannot be mapped
        for parameter, (layout, positions) in fresh.items():
            shape = stored_shard(parameter).shape
            views = _show(pages, layout, positions, shape.numel())
            shown = {key: rounds.as_sharded(view.view(shape), parameter, shape) for key, view in views.items()}
            self._stored[parameter] = _Stored(layout, positions, shown)

    def _is_there(self, member: rounds.Member) -> bool:
        stored = self._stored.get(member.parameter)
        if stored is None:
            return member.parameter not in self._wanted
        return not _has_begun(member.state) or all(member.state.get(key) is one for key, one in stored.shown.items())

    def _check(self) -> None:
        if self._why_over is not None:
            raise OffloadError(self._why_over)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _show(pages: mmap | None, layout: StateLayout, positions: Sequence[int], size: int) -> dict[str, Tensor]:
    """Return flat states over pages of the file: current and writable between steps."""
    views = {}
    for (key, dtype), position, count in zip(layout.elementwise, positions, layout.stored_bytes(size), strict=True):
        memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # an empty tensor cannot lie anywhere
        if pages is not None and size:
            memory = torch.frombuffer(pages, dtype=torch.uint8, count=count, offset=position)
        views[key] = layout.slot(key, dtype, memory, size)
    return views


def _move(file: DiskFile, buffer: Tensor, written: Iterable[_Span], read: Iterable[_Span]) -> None:
    for call, spans in ((file.write, written), (file.read, read)):
        for place, position in chain.from_iterable(span.slots for span in spans):
            call(bytes_of(buffer, place.start, place.stop - place.start), position)


def _close(threads: ThreadPoolExecutor, file: DiskFile) -> None:
    threads.shutdown(wait=False)  # this is a finalizer, which may run in the midst of what waiting needs
    file.close()


def _step(step_round: rounds.StepRound, spans: Sequence[_Span], buffer: Tensor) -> dict[rounds.Member, rounds.State]:
    """Step what is in a buffer; return the values that parameters have once."""
    slots, members = [span.cut(buffer) for span in spans], [span.member for span in spans]
    seeds = make_seeds(members, [member.local_state for member in members])
    parts = [
        Part(span.member, span.range, _stored_part(span.member.local_state, slot), span.layout.form, seed)
        for span, slot, seed in zip(spans, slots, seeds, strict=True)
    ]
    step_parts(step_round, parts)
    return {part.member: _keep_states(part, slot) for part, slot in zip(parts, slots, strict=True)}


def _has_begun(state: rounds.State) -> bool:
    """Whether there is a state: the momentum buffer of SGD may be ``None``."""
    return any(value is not None for value in state.values())


def _stored_part(state: rounds.State, slots: dict[str, Tensor]) -> rounds.State:
    """Return the states of a part; a step that fails must not change what there is once, such as the step count."""
    scalars = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    counts = {key: one.detach().clone() for key, one in state.items() if isinstance(one, Tensor) and not one.dim()}
    return scalars | counts | slots if _has_begun(state) else {}


def _keep_states(part: Part, slots: Mapping[str, Tensor]) -> rounds.State:
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
