"""Where optimizer states lie in a file, and which parts of it are moved together.

The states of a parameter lie one after the other, each in one run, so that a file-backed tensor can show it. A chunk
is what is read, stepped and written at once: a part of a large parameter, or several small ones, which then are a
single run of bytes as far as they are neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_vram.core.host.disk_file import PAGE_BYTES
from lightning_vram.optimizers.on_disk.layouts import StateLayout

PART_ELEMENTS = 4096
"""Large parameters are cut at multiples of this: kernels treat the end of a vector otherwise than its middle, so cuts
elsewhere could change bits."""
_SMALL_ALIGNMENT = 64  # enough for any dtype


@dataclass(frozen=True, slots=True)
class Block:
    """One state of one parameter in the file."""

    layout: StateLayout
    number: int  # which of its tensors
    position: int  # of its first byte
    room_end: int  # where the next block begins

    def bytes_of(self, count: int) -> int:
        """Bytes of so many weights, the first or all of them."""
        return self.layout.kept_bytes(count)[self.number]


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes: ``length`` bytes at ``position`` of the file, at ``offset`` of a buffer.

    Both begin at the same byte of a page, as is needed to read past the page cache.
    """

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
    """What is moved together."""

    spans: list[Span]
    extents: list[Extent]
    num_elements: int = 0
    num_bytes: int = 0


class StatePlaces:
    """The places of all states of parameters with so many weights (``sizes``) and such states (``layouts``)."""

    def __init__(self, sizes: Sequence[int], layouts: Sequence[StateLayout]) -> None:
        self.sizes = tuple(sizes)
        self._layouts = set(layouts)
        positions, end = [], 0
        for size, layout in zip(sizes, layouts, strict=True):
            for num_bytes in layout.kept_bytes(size):
                positions.append(_align(end, num_bytes))
                end = positions[-1] + num_bytes
        self.total_bytes = end
        rooms = pairwise([*positions, end])
        self.blocks = [
            [Block(kept, number, *next(rooms)) for number in range(len(kept.elementwise))] for kept in layouts
        ]

    def buffer_bytes(self, chunk_elements: int) -> int:
        """Size of a buffer that any part of that many weights fits into."""
        widest = max((sum(layout.kept_bytes(chunk_elements)) for layout in self._layouts), default=0)
        lost_bytes = 2 * PAGE_BYTES * max(map(len, self.blocks), default=0)  # between runs
        return min(widest, self.total_bytes) + lost_bytes

    def plan(self, work: Sequence[int], chunk_elements: int) -> list[Chunk]:
        """Cut the parameters ``work``, in that order, into chunks which fit into ``buffer_bytes(chunk_elements)``."""
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
        """Add weights of a parameter to a chunk, if they fit into what is left of the buffer."""
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
            if stop == self.sizes[index]:  # the gap to the next block belongs to nobody: one run goes on over it
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
    """Return where a run of bytes can begin: what is smaller than a page would waste one."""
    multiple = PAGE_BYTES if num_bytes >= PAGE_BYTES else _SMALL_ALIGNMENT
    return -(-position // multiple) * multiple
