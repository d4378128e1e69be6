"""Calibration: on the simulated accelerator, and step by step with a device that is played."""

import re
from dataclasses import replace

import pytest
import torch
from support.devices import DEVICE, device_module

from lightning_vram.memory.device.accelerators import AllocatorBytes
from lightning_vram.memory.estimate import workspaces
from lightning_vram.memory.estimate.device_spec import DeviceSpec, read_calibration, write_calibration
from lightning_vram.memory.estimate.workspaces import calibrate
from lightning_vram.memory.units import GIB, MIB

CPU = torch.device("cpu")
RESULT_BYTES = 4 * workspaces._FIRST_SIZE**2


@pytest.fixture
def small(monkeypatch):
    """Little work: what it measures means nothing then."""
    for name, value in {"_SIZE": 64, "_COPY_BYTES": 4096, "_SECONDS": 1e-4}.items():
        monkeypatch.setattr(workspaces, name, value)


def play_products(monkeypatch, *, kept, peak):
    """A device on which the first product takes ``peak`` bytes beside its result and keeps ``kept`` of them."""

    class Watch:
        def __init__(self, device):
            pass

        def restart(self):
            pass

        def read(self):
            now = 1000 + RESULT_BYTES + kept
            return AllocatorBytes(now, now, 1000 + RESULT_BYTES + peak, now)

    monkeypatch.setattr(workspaces.accelerators, "PeakWatch", Watch)
    monkeypatch.setattr(workspaces.accelerators, "read_allocator", lambda device: AllocatorBytes(1000, 0, 0, 0))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)


@pytest.mark.parametrize(
    ("kept", "peak", "found"),
    [
        (8_519_680, 8_519_680, (8_519_680, True)),
        (0, 32 * MIB, (32 * MIB, False)),
        (0, 0, (None, None)),
    ],
    ids=["kept", "for each product", "none"],
)
def test_a_workspace_is_what_the_first_product_takes_beside_its_result(kept, peak, found, monkeypatch):
    play_products(monkeypatch, kept=kept, peak=peak)
    assert workspaces._measure_workspace(CPU) == found


def play_driver(monkeypatch, used, reserved):
    class Module:
        @staticmethod
        def mem_get_info(device):
            return 24 * GIB - used, 24 * GIB

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    monkeypatch.setattr(workspaces.accelerators, "empty_cache", lambda device: 0)
    monkeypatch.setattr(workspaces.accelerators, "read_allocator", lambda device: AllocatorBytes(0, reserved, 0, 0))


def test_the_context_is_what_is_used_and_not_reserved(monkeypatch):
    play_driver(monkeypatch, used=700 * MIB, reserved=300 * MIB)
    assert workspaces._measure_context(CPU) == 400 * MIB
    play_driver(monkeypatch, used=0, reserved=300 * MIB)
    assert workspaces._measure_context(CPU) == 0


def test_other_processes_on_the_card_are_an_error(monkeypatch):
    play_driver(monkeypatch, used=5 * GIB, reserved=GIB)
    expected = (
        "4.00 GiB of GPU memory are used outside of this process's tensors, more than a driver needs. Calibrate while "
        "no other process uses the GPU."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(expected)}$"):
        workspaces._measure_context(CPU)


def test_formats_that_the_card_lacks_are_not_measured(small, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(workspaces.accelerators, "has_native_bf16", lambda kind: False)
    old = DeviceSpec("old", GIB, capability=(7, 5))
    assert set(workspaces._measure_products(CPU, old)) == {"fp32", "fp16"}
    monkeypatch.setattr(workspaces.accelerators, "has_native_bf16", lambda kind: True)
    new = replace(old, capability=(8, 0))
    assert set(workspaces._measure_products(CPU, new)) == {"fp32", "tf32", "fp16", "bf16"}
    assert set(workspaces._measure_products(CPU, replace(old, capability=None))) == {"fp32", "fp16", "bf16"}


@pytest.mark.device
def test_a_card_is_measured_and_kept_in_a_file(small, tmp_path):
    spec = calibrate()
    assert spec.memory_bytes == device_module().mem_get_info()[1]
    assert spec.name == device_module().get_device_name()
    assert 0 <= spec.context_bytes < 2 * GIB
    assert spec.bus_bytes_per_s > 0
    assert spec.bandwidth_bytes_per_s > 0
    assert {"fp32", "fp16"} <= set(spec.flops_per_s)
    assert DEVICE != "sim" or spec.workspace_bytes is None
    write_calibration(spec, tmp_path / "this.json")
    assert read_calibration(tmp_path / "this.json") == spec
