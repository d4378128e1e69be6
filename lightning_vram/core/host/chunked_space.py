"""Host memory: chunks used again in every step, pinned where there is a GPU, and weights split in two halves."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_vram.memory.units import MIB

FIRST_CHUNK_BYTES = MIB
LARGEST_CHUNK_BYTES = 64 * MIB
ALIGNMENT_BYTES = 64  # of any dtype, and of a cache line

Payload = TypeVar("Payload")


@dataclass(slots=True, eq=False)
class _Chunk(Generic[Payload]):
    payload: Payload
    size: int
    used: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Piece(Generic[Payload]):
    """A stretch of one chunk."""

    payload: Payload
    start: int
    num_bytes: int


class Block(Generic[Payload]):
    """Space that is taken as long as this object lives."""

    __slots__ = ("_released", "chunks", "pieces")

    def __init__(
        self, pieces: list[Piece[Payload]], chunks: list[_Chunk[Payload]], released: "deque[list[_Chunk[Payload]]]"
    ) -> None:
        self.pieces = pieces
        self.chunks = chunks
        self._released = released

    def __del__(self) -> None:
        # In whatever thread, perhaps in the middle of anything: appending is atomic, the rest waits for its turn.
        self._released.append(self.chunks)


class ChunkedSpace(Generic[Payload]):
    """Space in fixed chunks, which grows and never shrinks. Safe to use from several threads.

    Within a chunk space is given front to back; a chunk is free again when the last block in it is gone. A training
    step frees everything it took, so from the second step on the space of the first one is enough. A large block spans
    chunks; a small one does not make a large one: the first chunk has 1 MiB, each further one twice as much, up to 64
    MiB.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: _Chunk[Payload] | None = None
        self._free: list[_Chunk[Payload]] = []
        self._free_bytes = 0
        self._last_size = 0
        self._released: deque[list[_Chunk[Payload]]] = deque()
        self._num_blocks = 0
        self.total_bytes = 0
        """Size of all chunks."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are alive."""
        with self._lock:
            self._collect()
            return self._num_blocks

    def take(self, num_bytes: int, make_chunks: Callable[[list[int]], list[Payload]]) -> Block[Payload]:
        """Return a block of ``num_bytes``, at least 1, in one piece or several.

        ``make_chunks`` is called if there is not enough: it makes chunks of the given sizes, all or none. If it raises,
        nothing has changed.
        """
        with self._lock:
            self._collect()
            rounded = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            free_bytes = self._free_bytes + (self._open.size - self._open.used if self._open is not None else 0)
            if rounded > free_bytes:
                self._grow(rounded - free_bytes, make_chunks)
            return self._fill(num_bytes, rounded)

    def _fill(self, num_bytes: int, rounded: int) -> Block[Payload]:
        # First of all: should filling it be interrupted, what it has by then comes back with it.
        block: Block[Payload] = Block([], [], self._released)
        self._num_blocks += 1
        while rounded:
            chunk = self._open
            if chunk is None or chunk.used == chunk.size:
                chunk = self._open = self._free.pop()
                self._free_bytes -= chunk.size
            length = min(rounded, chunk.size - chunk.used)
            block.pieces.append(Piece(chunk.payload, chunk.used, min(length, num_bytes)))
            chunk.num_blocks += 1
            block.chunks.append(chunk)
            chunk.used += length
            rounded -= length
            num_bytes -= length
        return block

    def _grow(self, missing_bytes: int, make_chunks: Callable[[list[int]], list[Payload]]) -> None:
        sizes, last = [], self._last_size
        while missing_bytes > 0:
            last = min(2 * last, LARGEST_CHUNK_BYTES) or FIRST_CHUNK_BYTES
            sizes.append(last)
            missing_bytes -= last
        payloads = make_chunks(sizes)
        self._last_size = last
        self._free[:0] = [_Chunk(payload, size) for payload, size in zip(payloads, sizes, strict=True)][::-1]
        self._free_bytes += sum(sizes)
        self.total_bytes += sum(sizes)

    def _collect(self) -> None:
        while self._released:
            self._num_blocks -= 1
            for chunk in self._released.popleft():
                chunk.num_blocks -= 1
                if chunk.num_blocks == 0:
                    chunk.used = 0
                    if chunk is not self._open:
                        self._free.append(chunk)
                        self._free_bytes += chunk.size
