"""Sizes that the allocator is built on, and its settings, read as PyTorch reads them from ``PYTORCH_ALLOC_CONF``."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_vram.memory.device.allocator_settings import VARIABLES
from lightning_vram.memory.units import MIB

MIN_BLOCK = 512
SMALL = MIB  # the largest request that goes to the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE = 10 * MIB  # from here on a segment of its own
ROUND_LARGE = 2 * MIB
_NUM_INTERVALS = 16  # of roundup_power2_divisions: sizes from 1 MiB on, doubling
_WITHOUT_EFFECT = (  # on what is reserved; the first collects only in a process that has a memory fraction
    *("garbage_collection_threshold", "per_process_memory_fraction", "throw_on_cudamalloc_oom"),
    *("release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "graph_capture_record_stream_reuse"),
    *("pinned_use_cuda_host_register", "pinned_use_hip_host_register", "pinned_num_register_threads"),
    *("pinned_use_background_threads", "pinned_reserve_segment_size_mb", "pinned_free_catch_all"),
    *("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"),
)
_PAIR = re.compile(r"([^,:\[\]]+):(\[[^\]]*\]|[^,:\[\]]+)")


@dataclass(frozen=True)
class AllocatorSettings:
    """What decides on blocks and segments."""

    expandable_segments: bool = False  # whether segments grow page by page instead of being made for one size
    max_split_bytes: int | None = None  # blocks of this size and above are not split. ``None`` splits all
    # by how much less a block that is not split may be larger than what is asked for
    max_non_split_rounding_bytes: int = LARGE_SEGMENT
    # segment for requests above 1 MiB and below 10 MiB; page of large expandable segments
    large_segment_bytes: int = LARGE_SEGMENT
    # steps between two powers of 2 that sizes are rounded up to, for sizes from 1 MiB, 2 MiB, 4 MiB, ... on; empty
    # and 0 round to 512 bytes
    roundup_power2_divisions: tuple[int, ...] = ()
    # names of settings that were given and have no effect on the simulation
    ignored: tuple[str, ...] = field(default=(), compare=False)

    def may_serve(self, block_bytes: int, num_bytes: int) -> bool:
        """Whether a free block may serve a request: one that is not split must be kept for what needs it."""
        limit = self.max_split_bytes
        if limit is None or block_bytes < limit:
            return True
        return num_bytes >= limit and block_bytes < num_bytes + self.max_non_split_rounding_bytes


def read_settings(environment: Mapping[str, str] = os.environ) -> AllocatorSettings:
    """Return the settings that a process with this environment would have."""
    texts = (environment.get(name, "") for name in VARIABLES)
    return parse_settings(next((text for text in texts if text.strip()), ""))


def parse_settings(text: str) -> AllocatorSettings:
    """Read settings as they stand in ``PYTORCH_ALLOC_CONF`` and ``PYTORCH_CUDA_ALLOC_CONF``.

    Example:
        >>> parse_settings("expandable_segments:True").expandable_segments
        True
    """
    values = _split(text)
    name = "large_segment_size_mb"
    large_bytes = _read_mib(name, values.pop(name), MIN_LARGE // MIB + 1) if name in values else LARGE_SEGMENT
    given: dict[str, Any] = {"large_segment_bytes": large_bytes, "max_non_split_rounding_bytes": large_bytes}
    ignored = []
    for name, value in values.items():
        if name in _READERS:
            argument, read = _READERS[name]
            given[argument] = read(name, value, large_bytes // MIB)
        elif name == "backend" and value != "native":
            raise ValueError(f"backend:{value} is another allocator than the one that is simulated, backend:native.")
        elif name in _WITHOUT_EFFECT:
            ignored.append(name)
        elif name != "backend":
            raise ValueError(f"{name!r} is no setting of PyTorch's allocator, in {text!r}.")
    return AllocatorSettings(**given, ignored=tuple(ignored))


def _split(text: str) -> dict[str, str]:
    text = "".join(text.split()).removesuffix(",")
    pairs = _PAIR.findall(text)
    if ",".join(f"{name}:{value}" for name, value in pairs) != text:
        raise ValueError(f"the allocator's settings must be name:value pairs with commas between, got {text!r}.")
    return dict(pairs)


def _read_mib(name: str, value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"{name} must be a whole number of MiB from {least} on, got {value!r}.")
    return int(value) * MIB


def _read_bool(name: str, value: str, _: int) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{name} must be True or False, got {value!r}.")
    return value == "True"


def _read_divisions(name: str, value: str, _: int) -> tuple[int, ...]:
    if not value.startswith("["):
        return (_power_of_2(name, value),) * _NUM_INTERVALS
    divisions = [0] * _NUM_INTERVALS
    last = -1
    for number, pair in enumerate(value[1:-1].split(",")):
        boundary, _colon, steps_text = pair.partition(":")
        steps = 0 if steps_text == "0" else _power_of_2(name, steps_text)
        if boundary == ">":
            divisions[last + 1 :] = [steps] * (_NUM_INTERVALS - last - 1)
            continue
        last = min(_power_of_2(name, boundary).bit_length() - 1, _NUM_INTERVALS - 1)
        if number == 0:
            divisions[:last] = [steps] * last  # smaller sizes as the first that is named
        divisions[last] = steps
    return tuple(divisions)


def _power_of_2(name: str, text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1 or number & (number - 1):
        raise ValueError(f"{name} must be made of powers of 2, got {text!r}.")
    return number


_READERS: dict[str, tuple[str, Callable[[str, str, int], Any]]] = {
    "expandable_segments": ("expandable_segments", _read_bool),
    "max_split_size_mb": ("max_split_bytes", _read_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
}


def round_up(num_bytes: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-num_bytes // multiple) * multiple


def round_request(num_bytes: int, divisions: Sequence[int] = ()) -> int:
    """Return the size of the block that serves a request, with ``divisions`` as in the settings."""
    if num_bytes < MIN_BLOCK:
        return MIN_BLOCK
    if divisions:
        interval = num_bytes.bit_length() - MIB.bit_length()
        steps = divisions[min(max(interval, 0), len(divisions) - 1)]
        if steps > 1 and num_bytes > MIN_BLOCK * steps:
            return round_up(num_bytes, (1 << (num_bytes.bit_length() - 1)) // steps)
    return round_up(num_bytes, MIN_BLOCK)
