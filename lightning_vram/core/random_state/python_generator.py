"""Python's global generator: its state in one piece.

``random.getstate`` makes 625 numbers of it, which takes 17 us, and to compare them takes another 10: too long for what
is asked twice in each call of a layer. Here the memory of the generator is copied (0.5 us), and numbers are made of it
only where a state is set. Where that memory is not laid out as expected, which is tried once, numbers are kept.
"""

import ctypes
import random
import struct
from typing import Any

State = tuple[Any, ...]
"""Two of them are equal if the generator is to draw the same."""

_generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
_START = object.__basicsize__
_NUM_BYTES = random.Random.__base__.__basicsize__ - _START  # type: ignore[union-attr]
_LAYOUT = struct.Struct("=i624I")  # where it stands in the words; the words


def read_python() -> State:
    """Return the state."""
    if not _is_as_expected:
        return random.getstate()
    return ctypes.string_at(id(_generator) + _START, _NUM_BYTES), _generator.gauss_next


def write_python(state: State) -> None:
    """Set what :func:`read_python` has returned."""
    random.setstate(_as_numbers(*state) if _is_as_expected else state)


def _as_numbers(memory: bytes, gauss_next: float | None) -> tuple[Any, ...]:
    index, *words = _LAYOUT.unpack_from(memory)
    return random.Random.VERSION, (*words, index), gauss_next


def _is_laid_out_as_expected() -> bool:
    if _LAYOUT.size > _NUM_BYTES:
        return False
    memory = ctypes.string_at(id(_generator) + _START, _NUM_BYTES)
    return bool(_as_numbers(memory, _generator.gauss_next) == random.getstate())


_is_as_expected = _is_laid_out_as_expected()
