"""Whether values that were read from a file are those of a measurement, before anything computes with them."""

import math
from collections.abc import Callable
from typing import Any

_MOST_BYTES = 2**63 - 1  # what a driver counts in


def check_values(values: Any) -> None:
    """Check the type and range of each value; names that are missing or unknown are not looked at.

    Args:
        values: A line of the file, parsed.

    Raises:
        ValueError: If one is wrong; says which, and what it has to be.
    """
    if not isinstance(values, dict):
        raise ValueError(f"it is no object with names and values, got {type(values).__name__}")
    for name, value in values.items():
        what, is_right = _KINDS.get(name, ("", _is_anything))
        if not is_right(value):
            raise ValueError(f"{name} must be {what}, got {value!r:.80}")


def _is_anything(value: Any) -> bool:
    return True


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_BYTES


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _or_null(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("stage", "device", "source"), ("a text", _is_text)),
    **dict.fromkeys(("epoch", "batch_idx", "step"), ("an int of at least 0", _is_count)),
    **dict.fromkeys(("allocated_bytes", "peak_allocated_bytes"), ("a number of bytes", _is_count)),
    **dict.fromkeys(
        ("reserved_bytes", "peak_reserved_bytes", "host_peak_bytes", "saved_for_backward_bytes"),
        ("a number of bytes or null", _or_null(_is_count)),
    ),
    **dict.fromkeys(
        ("peak_by_phase", "peak_by_category", "peak_by_module"), ("an object of numbers of bytes", _is_table)
    ),
    "seconds_per_batch": ("a number of seconds or null", _or_null(_is_duration)),
}
