"""Traces of the allocator as text, small enough to keep, and back."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.benchmarks.gpu_day.results import Row

Entry = Mapping[str, Any]
_TAKEN, _GIVEN = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_STATES = {"+": "active_allocated", "~": "active_awaiting_free", "": "inactive"}
_BLOCK = re.compile(r"([+~]?)(\d+)(?::(\d+):(\d+))?")
_ENTRY = re.compile(r"([-+~Ss])(\d*)(?::(\d+))?(?:@(\d+))?")


def reduce_trace(snapshot: Mapping[str, Any], ends: Mapping[str, int], start: Sequence[Entry] = ()) -> Row:
    """Write a snapshot's trace as text.

    Args:
        snapshot: Of ``torch.cuda.memory``.
        ends: For each phase the number of entries up to its end.
        start: ``segments`` of a snapshot from before the trace.

    Returns:
        ``start``, a text for each segment: ``Le:7f00@0=+1:512:400,1536`` is a large one (``S``: small) that can expand
        (``e``), at this address, of stream 0, with a block in use, called 1, of 512 bytes for a request of 400
        (``~1``: it waits for another stream), and 1536 bytes behind it that are free. ``phases``, for each a text:
        ``+3:512`` is an allocation of 512 bytes, which is called 3; ``~3`` a free that waits for another stream;
        ``-3`` the end of its use, ``-:512`` that of one that is not known; ``S:2097152`` and ``s:2097152`` a segment
        taken from the device and given back. ``@7`` follows what is on another stream than ``stream``.
    """
    trace = next((entries for entries in snapshot["device_traces"] if entries), [])
    numbers, living = itertools.count(1), {}
    segments = [_write_segment(segment, living, numbers) for segment in start]
    stream = trace[0]["stream"] if trace else 0
    phases, position = {}, 0
    texts = list(_write_entries(trace, living, numbers, stream))
    for phase, end in ends.items():
        phases[phase] = " ".join(text for text in texts[position:end] if text)
        position = end
    return {"phases": phases, "num_entries": len(trace), "stream": stream, "start": segments}


def expand_trace(row: Row) -> tuple[list[Entry], list[Entry]]:
    """Read back what :func:`reduce_trace` has written: segments of the start, and entries, as in a snapshot.

    Addresses of the trace's own blocks are made up.
    """
    addresses: dict[str, int] = {}
    segments = [_read_segment(text, addresses) for text in row["start"]]
    entries = []
    for text in " ".join(row["phases"].values()).split():
        kind, number, size, stream = _ENTRY.fullmatch(text).groups()
        if kind == "+":
            addresses[number] = -int(number)
        action = {"S": "segment_alloc", "s": "segment_free", "+": "alloc", "~": "free_requested", "-": "free_completed"}
        entry = {"action": action[kind], "size": int(size or 0), "stream": int(stream or row["stream"])}
        entries.append({**entry, "addr": addresses.get(number, 0)})
    return segments, entries


def _write_segment(segment: Entry, living: dict[int, int], numbers: Iterator[int]) -> str:
    blocks = []
    for block in segment["blocks"]:
        mark = next(mark for mark, state in _STATES.items() if state == block["state"])
        if mark:
            living[block["address"]] = number = next(numbers)
            blocks.append(f"{mark}{number}:{block['size']}:{block['requested_size']}")
        else:
            blocks.append(str(block["size"]))
    kind = segment["segment_type"][0].upper() + ("e" if segment["is_expandable"] else "")
    return f"{kind}:{segment['address']:x}@{segment['stream']}={','.join(blocks)}"


def _read_segment(text: str, addresses: dict[str, int]) -> Entry:
    kind, place, stream, blocks_text = re.split("[:@=]", text, maxsplit=3)
    address = position = int(place, 16)
    blocks = []
    for block in blocks_text.split(","):
        mark, first, size, requested = _BLOCK.fullmatch(block).groups()
        if mark:
            addresses[first] = position
        sizes = {"size": int(size or first), "requested_size": int(requested or 0)}
        blocks.append({"address": position, "state": _STATES[mark], **sizes})
        position += sizes["size"]
    return {
        "address": address,
        "total_size": position - address,
        "stream": int(stream),
        "segment_type": {"L": "large", "S": "small"}[kind[0]],
        "is_expandable": kind.endswith("e"),
        "blocks": blocks,
    }


def _write_entries(
    trace: Sequence[Entry], living: dict[int, int], numbers: Iterator[int], first_stream: int
) -> Iterator[str]:
    for entry, following in itertools.zip_longest(trace, trace[1:]):
        text = _write_entry(entry, following, living, numbers)
        yield text if not text or entry["stream"] == first_stream else f"{text}@{entry['stream']}"


def _write_entry(entry: Entry, following: Entry | None, living: dict[int, int], numbers: Iterator[int]) -> str:
    match entry["action"]:
        case "alloc":
            living[entry["addr"]] = number = next(numbers)
            return f"+{number}:{entry['size']}"
        case "free_requested" if entry["addr"] in living:
            is_done = following is not None and following["action"] == "free_completed"
            return "" if is_done and following["addr"] == entry["addr"] else f"~{living[entry['addr']]}"
        case "free_completed":
            number = living.pop(entry["addr"], None)
            return f"-{number}" if number is not None else f"-:{entry['size']}"
        case action if action in _TAKEN:
            return f"S:{entry['size']}"
        case action if action in _GIVEN:
            return f"s:{entry['size']}"
    return ""
