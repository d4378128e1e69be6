"""Readings on their way through names, files and reductions."""

import json
from dataclasses import asdict

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


def test_comes_back_from_a_file(tmp_path):
    path = tmp_path / "new" / "vram.jsonl"
    write_measurement(path, READING)
    write_measurement(path, READING)
    assert read_measurements(path) == [READING, READING]


@pytest.mark.parametrize("line", ["{", "[]", '{"stage": "train"}', '{"nonsense": 1}'])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "vram.jsonl"
    write_measurement(path, READING)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"vram\.jsonl, line 2 is not a VRAMMonitor measurement: "):
        read_measurements(path)


def test_what_is_nested_too_deep_or_no_text_is_named(tmp_path):
    path = tmp_path / "vram.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"vram\.jsonl, line 1 is not a VRAMMonitor measurement: "):
        read_measurements(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"vram\.jsonl is not a VRAMMonitor file: it is not text"):
        read_measurements(path)




def test_an_empty_file_is_named(tmp_path):
    path = tmp_path / "vram.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match=r"vram\.jsonl contains no measurements\.$"):
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
