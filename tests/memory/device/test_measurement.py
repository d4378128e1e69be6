"""Readings on their way through names, files and reductions."""

import pytest
import torch
from torch import nn

from lightning_vram.memory.device.measurement import Measurement, largest, read_measurements, write_measurement
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.private_names.dispatcher import is_compiled

READING = Measurement(
    stage="train",
    epoch=1,
    batch_idx=7,
    step=4,
    device="cuda:0",
    source="allocator",
    allocated_bytes=10,
    peak_allocated_bytes=40,
    reserved_bytes=20,
    peak_reserved_bytes=60,
    peak_by_phase={"forward": 30, "backward": 40},
    seconds_per_batch=0.5,
)


def test_names_its_sizes():
    assert READING.sizes() == {
        "allocated_bytes": 10,
        "peak_allocated_bytes": 40,
        "reserved_bytes": 20,
        "peak_reserved_bytes": 60,
        "forward/peak_allocated_bytes": 30,
        "backward/peak_allocated_bytes": 40,
    }


def test_a_timeline_adds_categories():
    layer = nn.Linear(4, 4)
    with track_memory(layer) as tracker:
        layer(torch.ones(2, 4)).sum().backward()
    reading = READING.with_timeline(tracker.timeline)
    assert reading.sizes()["parameters_bytes"] == 80
    assert set(reading.peak_by_category) == set(Category)
    assert reading.with_sizes(reading.sizes()) == reading
    assert READING.peak_by_category == {}
    doubled = READING.with_sizes({name: 2 * size for name, size in READING.sizes().items()})
    assert doubled.sizes() == {name: 2 * size for name, size in READING.sizes().items()}


def test_comes_back_from_a_file(tmp_path):
    path = tmp_path / "new" / "vram.jsonl"
    write_measurement(path, READING)
    write_measurement(path, READING)
    assert read_measurements(path) == [READING, READING]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        *(
            (line, ", line 1 is not a VRAMMonitor measurement: ")
            for line in (b"[]", b'{"nonsense": 1}', b"[" * 100_000)
        ),
        (b"\xff", " is not a VRAMMonitor file: it is not text"),
        (b"", r" contains no measurements\.$"),
    ],
    ids=["another type", "another field", "nested too deep", "no text", "empty"],
)
def test_a_broken_file_is_named(tmp_path, written, message):
    path = tmp_path / "vram.jsonl"
    path.write_bytes(written)
    with pytest.raises(ValueError, match=r"vram\.jsonl" + message):
        read_measurements(path)


def test_the_largest_of_equals_is_the_first():
    small = READING.with_sizes(dict.fromkeys(READING.sizes(), 1))
    assert largest([small, READING, READING]) is READING


def test_finds_compiled_parts():
    plain = nn.Sequential(nn.Linear(2, 2))
    assert not is_compiled(plain)
    assert is_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")))
    plain[0].compile(backend="eager")
    assert is_compiled(plain)
