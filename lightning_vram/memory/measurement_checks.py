"""Whether values that were read from a file are those of a measurement, before anything computes with them."""

import math
from typing import Any

_TEXTS = ("stage", "device", "source")
_NUMBERS = ("epoch", "batch_idx", "step")
_SIZES = ("allocated_bytes", "peak_allocated_bytes")
_OPTIONAL_SIZES = ("reserved_bytes", "peak_reserved_bytes", "host_peak_bytes", "saved_for_backward_bytes")
_TABLES = ("peak_by_phase", "peak_by_category", "peak_by_module")
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
        if name in _TEXTS and not isinstance(value, str):
            raise ValueError(f"{name} must be a text, got {value!r:.80}")
        if name in _NUMBERS and not _is_count(value):
            raise ValueError(f"{name} must be an int of at least 0, got {value!r:.80}")
        if name in _SIZES and not _is_count(value):
            raise ValueError(f"{name} must be a number of bytes, got {value!r:.80}")
        if name in _OPTIONAL_SIZES and value is not None and not _is_count(value):
            raise ValueError(f"{name} must be a number of bytes or null, got {value!r:.80}")
        if name in _TABLES and not (isinstance(value, dict) and all(map(_is_count, value.values()))):
            raise ValueError(f"{name} must be an object of numbers of bytes, got {value!r:.80}")
        if name == "seconds_per_batch" and value is not None and not _is_duration(value):
            raise ValueError(f"{name} must be a number of seconds or null, got {value!r:.80}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_BYTES


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
