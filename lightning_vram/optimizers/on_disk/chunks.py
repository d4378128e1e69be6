"""Positions of optimizer states in a file, and chunks that are read, stepped and written at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_vram.core.host.disk_file import PAGE_BYTES
from lightning_vram.optimizers.on_disk.layouts import StateLayout

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
    room_end: int  # where the next block begins

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
                positions.append(_align(end, num_bytes))
                end = positions[-1] + num_bytes
        self.total_bytes = end
        rooms = pairwise([*positions, end])
        self.blocks = [
            [Block(layout, number, *next(rooms)) for number in range(len(layout.elementwise))] for layout in layouts
        ]

    def buffer_bytes(self, chunk_elements: int) -> int:
        """Return the size of a buffer for any chunk of so many weights."""
        widest = max((sum(layout.stored_bytes(chunk_elements)) for layout in self._layouts), default=0)
        lost_bytes = 2 * PAGE_BYTES * max(map(len, self.blocks), default=0)  # between runs
        return min(widest, self.total_bytes) + lost_bytes

    def plan(self, work: Sequence[int], chunk_elements: int) -> list[Chunk]:
        """Cut parameters, by index, into chunks that fit into ``buffer_bytes(chunk_elements)``; a multiple of 4096."""
        room_bytes = self.buffer_bytes(chunk_elements)
        chunks = [Chunk([], [])]
        for index in work:
            start, size = 0, self.sizes[index]
            while True:
                room = chunk_elements - chunks[-1].num_elements
                stop = size if size - start <= room else start + room // PART_ELEMENTS * PART_ELEMENTS
                if (stop == start < size) or not self._add(chunks[-1], (index, start, stop), room_bytes):
                    chunks.append(Chunk([], []))
                    continue
                start = stop
                if start == size:
                    break
        return [chunk for chunk in chunks if chunk.spans]

    def _add(self, chunk: Chunk, part: tuple[int, int, int], room_bytes: int) -> bool:
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
                extents[-1] = Extent(last.position, block.room_end - last.position, last.offset)
            end = extents[-1].offset + extents[-1].length
        if end > room_bytes and chunk.spans:
            return False
        chunk.spans.append(Span(index, start, stop, tuple(offsets)))
        chunk.extents, chunk.num_bytes = extents, end
        chunk.num_elements += stop - start
        return True


def _align(position: int, num_bytes: int) -> int:
    """Align runs of at least a page to pages; smaller ones would waste memory."""
    multiple = PAGE_BYTES if num_bytes >= PAGE_BYTES else _SMALL_ALIGNMENT
    return -(-position // multiple) * multiple
