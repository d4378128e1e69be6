"""What kinds of device have, and the room of one: faked where there is no GPU and real where there is one."""

import ast
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.devices import DEVICE, device_module
from support.helpers import write_files

import lightning_vram
from lightning_vram.memory.device import accelerators
from lightning_vram.memory.device.accelerators import (
    SETTING,
    VARIABLES,
    PeakWatch,
    PhasePeaks,
    configure_allocator,
    current_kind,
    empty_cache,
    fragmentation_advice,
    free_device_bytes,
    has_cache,
    has_expandable_segments,
    has_native_bf16,
    has_statistics,
    has_streams,
    is_capturing,
    pci_address,
    pin_in_place,
    read_allocator,
    reset_peaks,
    stream_id,
    supports_expandable_segments,
)
from lightning_vram.memory.tracking.timeline import Phase
from lightning_vram.memory.units import GIB, MIB

ROOT = Path(lightning_vram.__file__).parent
KINDS = ("cuda", "xpu", "mps", "mtia", "hpu", "npu")


@pytest.mark.parametrize(
    ("kind", "streams", "statistics"),
    [
        ("cuda", True, True),
        ("mps", False, True),  # torch 2.15 has streams of it, and events that refuse them
        ("xpu", True, True),
        ("cpu", False, False),
        ("hpu", False, False),  # its package is not imported
    ],
)
def test_what_kinds_of_device_have(kind, streams, statistics):
    assert has_streams(kind) is streams
    assert has_statistics(kind) is statistics


@pytest.mark.parametrize(
    ("kind", "module", "is_native"),
    [
        ("cpu", None, True),
        ("mps", SimpleNamespace(is_bf16_supported=lambda: True), False),  # where autocast has none
        ("xpu", SimpleNamespace(is_bf16_supported=lambda: False), False),
        ("hpu", SimpleNamespace(is_bf16_supported=lambda: True), True),
        ("hpu", SimpleNamespace(), True),
    ],
)
def test_bfloat16_is_asked_of_the_module(monkeypatch, kind, module, is_native):
    if module is not None:
        monkeypatch.setattr(torch, kind, module, raising=False)
    assert has_native_bf16(kind) is is_native


def test_a_machine_without_accelerator_computes_on_its_cpu_and_pins_nothing():
    assert current_kind() == "cpu"
    assert not pin_in_place(torch.zeros(3))
    assert stream_id(torch.device("cpu")) == 0
    assert not is_capturing(torch.device("cpu"))


def test_where_a_device_is_on_the_bus(monkeypatch):
    properties = {torch.device("cuda", 3): SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)}
    properties[torch.device("cuda", 4)] = SimpleNamespace(total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    assert [pci_address(device) for device in properties] == ["0001:3b:00.0", None]
    assert pci_address(torch.device("cpu")) is None


def test_cuda_is_named_where_it_alone_has_the_thing():
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and (
            node.attr in {f"is_{kind}" for kind in KINDS} or (node.attr in KINDS and ast.unparse(node.value) == "torch")
        )
    }
    files = {"memory/device/accelerators.py"}
    found = {place for place in found if "cuda_semantics.py" not in place}  # which plays CUDA
    assert {place.partition(":")[0] for place in found} == files, found


@pytest.fixture
def cuda_build(monkeypatch):
    """As on a machine with CUDA, which is not in use yet."""
    for name in (*VARIABLES, "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(accelerators, "is_wsl", lambda root: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


@pytest.mark.usefixtures("cuda_build")
def test_both_variables_are_set():
    environment = {"HOME": "/"}
    assert configure_allocator(environment)
    assert environment == {"HOME": "/", **dict.fromkeys(VARIABLES, SETTING)}
    assert configure_allocator(environment)  # again


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize("name", [*VARIABLES, "PYTORCH_HIP_ALLOC_CONF"])
def test_a_setting_of_the_user_wins(name):
    for own in ("expandable_segments:False", "backend:cudaMallocAsync", "max_split_size_mb:128"):
        environment = {name: own}
        assert not configure_allocator(environment)
        assert environment == {name: own}
    assert configure_allocator({name: "max_split_size_mb:128, expandable_segments: True"})  # the same


@pytest.mark.usefixtures("cuda_build")
def test_too_late_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    environment = {}
    with pytest.raises(RuntimeError, match=r"came too late.*PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"):
        configure_allocator(environment)
    assert environment == {}


@pytest.mark.parametrize(
    ("version", "platform", "files"),
    [
        (None, "linux", {}),  # of a ROCm build, too
        ("13.0", "win32", {}),
        ("13.0", "linux", {"proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2"}),
        ("13.0", "linux", {"proc/sys/kernel/osrelease": "5.15.148-tegra"}),
        ("13.0", "linux", {"proc/device-tree/compatible": "nvidia,p3701-0005\0nvidia,tegra234\0"}),
    ],
)
def test_where_segments_cannot_expand_nothing_is_set(monkeypatch, tmp_path, version, platform, files):
    for name in (*VARIABLES, "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(accelerators.sys, "platform", platform)
    root = write_files(tmp_path, files)
    for name in ("is_wsl", "is_tegra"):
        monkeypatch.setattr(accelerators, name, partial(lambda ask, _: ask(root), getattr(accelerators, name)))
    environment = {}
    assert not configure_allocator(environment)
    assert environment == {}
    assert fragmentation_advice(CUDA, 10 * GIB, 12 * GIB).endswith("callbacks=[EmptyCache(every_n_batches=...)].")


@pytest.mark.usefixtures("cuda_build")
def test_gb10_expands_segments(tmp_path):
    files = {"proc/sys/kernel/osrelease": "6.11.0-1016-nvidia", "proc/device-tree/compatible": "nvidia,gb10"}
    assert supports_expandable_segments(write_files(tmp_path, files))


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize(
    ("allocated", "reserved", "is_said"),
    [(10 * GIB, 12 * GIB, True), (10 * GIB, 11 * GIB, False), (1 << 20, 100 << 20, False)],
)
def test_advice_where_much_is_reserved_and_not_used(monkeypatch, allocated, reserved, is_said):
    advice = fragmentation_advice(CUDA, allocated, reserved)
    assert (advice is not None) is is_said
    if is_said:
        assert "12.00 GiB" in advice
        assert SETTING in advice
    monkeypatch.setenv(VARIABLES[0], SETTING)
    assert has_expandable_segments()
    assert fragmentation_advice(CUDA, allocated, reserved) is None


CUDA = torch.device("cuda", 0)
OTHER = torch.device("cuda", 1)
CPU = torch.device("cpu")


class FakeDevice:
    """A device of 80 GiB that holds what it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 10 * GIB
        self.reserved = 15 * GIB
        self.free = 60 * GIB
        self.fraction = 1.0
        for name, read in {
            "memory_allocated": lambda device: self.allocated,
            "memory_reserved": lambda device: self.reserved,
            "max_memory_allocated": lambda device: self.peak,
            "max_memory_reserved": lambda device: self.reserved,
            "reset_peak_memory_stats": self._reset,
            "mem_get_info": lambda device: (self.free, 80 * GIB),
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "get_device_properties": lambda device: SimpleNamespace(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, read)

    def reach(self, peak: int, then: int) -> None:
        self.peak, self.allocated = max(self.peak, peak), then

    def _reset(self, device: torch.device) -> None:
        if device == CUDA:
            self.peak = self.allocated


@pytest.fixture
def fake(monkeypatch):
    return FakeDevice(monkeypatch)


def test_devices_without_an_allocator_have_no_room():
    assert free_device_bytes(CPU) is None
    assert not has_cache(CPU)
    assert empty_cache(CPU) == 0
    for read in (PeakWatch, read_allocator):
        with pytest.raises(ValueError, match=r"^device 'cpu' has no caching allocator with statistics"):
            read(CPU)


def test_emptying_the_cache_returns_the_drop_in_reserved_memory(fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(fake, "reserved", 11 * GIB))
    assert empty_cache(CUDA) == 4 * GIB


def test_peaks_belong_to_the_phase_they_happened_in(fake):
    peaks = PhasePeaks(CUDA)
    fake.reach(90 * GIB, then=10 * GIB)  # before any phase: counts for the whole only
    peaks.switch(Phase.FORWARD)
    fake.reach(50 * GIB, then=40 * GIB)
    peaks.switch(Phase.BACKWARD)
    fake.reach(70 * GIB, then=20 * GIB)
    peaks.switch(Phase.FORWARD)
    fake.reach(60 * GIB, then=30 * GIB)
    peaks.switch(Phase.OPTIMIZER_STEP)
    now = peaks.read()
    assert peaks.by_phase == {Phase.FORWARD: 60 * GIB, Phase.BACKWARD: 70 * GIB, Phase.OPTIMIZER_STEP: 30 * GIB}
    assert (peaks.peak_allocated_bytes, peaks.peak_reserved_bytes) == (90 * GIB, 15 * GIB)
    assert now.allocated_bytes == 30 * GIB


@pytest.mark.parametrize(("fraction", "room_gib"), [(1.0, 65), (0.5, 30), (0.1, 0)])
def test_room_ends_at_the_share_of_this_process(fake, fraction, room_gib):
    fake.fraction = fraction
    assert free_device_bytes(CUDA) == room_gib * GIB


def test_peaks_survive_those_of_others(fake):
    room, watch = PeakWatch(CUDA), PeakWatch(CUDA)
    room.restart()
    fake.reach(30 * GIB, then=12 * GIB)
    reset_peaks(CUDA)  # a phase ends
    fake.reach(20 * GIB, then=12 * GIB)
    watch.restart()
    assert room.read().peak_allocated_bytes == 30 * GIB
    assert watch.read().peak_allocated_bytes == 12 * GIB
    fake.reach(25 * GIB, then=11 * GIB)
    room.restart()
    assert room.read().peak_allocated_bytes == 11 * GIB
    assert watch.read().peak_allocated_bytes == 25 * GIB
    assert watch.read().allocated_bytes == 11 * GIB


@pytest.mark.device
def test_the_room_of_a_real_device():
    device = torch.device(DEVICE, 0)
    room = PeakWatch(device)
    device_module().empty_cache()
    room.restart()
    start, before = read_allocator(device).allocated_bytes, free_device_bytes(device)
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert read_allocator(device).allocated_bytes == start + 64 * MIB
    assert abs(before - free_device_bytes(device) - 64 * MIB) <= 4 * MIB  # other processes
    del block
    assert room.read().peak_allocated_bytes == start + 64 * MIB
    assert abs(before - free_device_bytes(device)) <= 4 * MIB  # it is cached now
