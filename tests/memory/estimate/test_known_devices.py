"""Cards by name, and their file."""

import re
from dataclasses import replace

import pytest
from support.played_devices import PlayedDevice

from lightning_vram.memory.device import accelerators
from lightning_vram.memory.estimate.device_spec import (
    DeviceSpec,
    describe_this_device,
    find_device,
    known_devices,
    read_calibration,
    write_calibration,
)
from lightning_vram.memory.units import GIB, MIB

HALF = {"fp16", "bf16"}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("geforce-rtx-4070-ti", "RTX 4070 Ti"),
        ("h100", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Intel(R) Data Center GPU Max 1550", "Max 1550"),
    ],
)
def test_a_card_is_found_however_it_is_written(written, name):
    assert find_device(written).name == name


def test_an_unknown_card_is_told_apart_from_those_close_to_it():
    expected = (
        "device 'a100' is unknown. Did you mean A100 40GB, A100 SXM 40GB, A100 80GB, A100 SXM 80GB? `lightning-vram "
        "estimate --device list` prints all. For another GPU: DeviceSpec(name=..., memory_bytes=...), or --device NAME "
        "--device_memory 24GiB. For one that shares memory with the CPU (Apple): DeviceSpec(..., "
        "shares_host_memory=True)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        find_device("a100")
    with pytest.raises(ValueError, match=r"^device 'abacus' is unknown\. `lightning-vram estimate --device list` "):
        find_device("abacus")


@pytest.mark.parametrize("spec", known_devices(), ids=lambda spec: spec.name)
def test_what_is_known_of_a_card_goes_together(spec):
    assert 5 * GIB < spec.memory_bytes < 300 * GIB
    assert spec.memory_source
    # whoever packs more memory on a card gives it more bandwidth: what is written a digit off is seen here
    assert 2e9 < spec.bandwidth_bytes_per_s / (spec.memory_bytes / GIB) < 120e9
    rates = spec.flops_per_s
    assert rates["fp32"] > 4e12
    assert set(rates) <= {"fp32", "tf32", "fp16", "bf16", "int8", "fp8"}
    assert ("bf16" in rates) == ("tf32" in rates or spec.capability is None)
    assert rates.get("bf16", rates["fp16"]) == rates["fp16"]
    assert 1.8 < rates["fp16"] / rates["fp32"] < 40
    assert spec.capability is None or ("fp8" in rates) == (spec.capability >= (8, 9))
    assert spec.capability is None or ("bf16" in rates) == (spec.capability >= (8, 0))
    for tensor_core, of in (("tf32", 2), ("fp8", 0.5)):
        assert tensor_core not in rates or rates[tensor_core] * of == pytest.approx(rates["fp16"], rel=0.12)
    assert spec.shares_host_memory or 10e9 < spec.bus_bytes_per_s < 500e9
    assert spec.num_multiprocessors > 0


def test_a_well_known_card():
    spec = find_device("rtx4090")
    assert spec.memory_bytes == 24084 * MIB  # 23.52 GiB
    assert (spec.bandwidth_bytes_per_s, spec.flops_per_s["bf16"]) == (1008e9, 165.2e12)
    assert (spec.bus_bytes_per_s, spec.capability, spec.num_multiprocessors) == (31.5e9, (8, 9), 128)


@pytest.mark.parametrize(("value", "error"), [("24GiB", TypeError), (True, TypeError), (0, ValueError)])
def test_memory_is_a_number_of_bytes(value, error):
    with pytest.raises(error, match=r"DeviceSpec\(memory_bytes\) must be"):
        DeviceSpec("mine", value)


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "thisgpu.json"
    known = find_device("rtx4090")
    spec = replace(known, context_bytes=400 * MIB, workspace_bytes=8_519_680, is_workspace_kept=True)
    write_calibration(spec, path)
    assert read_calibration(path) == find_device(str(path)) == spec


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is not of format 1"),
        ('{"format": 2, "name": "x", "memory_bytes": 5}', "it is not of format 1"),
        ('{"format": 1, "name": "x"}', "memory_bytes"),
        ('{"format": 1, "name": "x", "memory_bytes": 5, "color": "red"}', "unexpected keyword argument 'color'"),
    ],
)
def test_a_file_of_another_form_is_refused(text, reason, tmp_path):
    path = tmp_path / "other.json"
    with pytest.raises(ValueError, match=f"^the file '{path}' cannot be read: No such file or directory\\.$"):
        find_device(str(path))
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path.name}' is not a file that `lightning-vram calibrate` wrote.*{reason}"):
        find_device(str(path))


def test_the_accelerator_at_hand_is_described_by_its_driver(monkeypatch):
    PlayedDevice(
        monkeypatch, "cuda", 23 * GIB, 0, name="NVIDIA GeForce RTX 4090", major=8, minor=9, multi_processor_count=127
    )
    spec = describe_this_device()
    assert (spec.name, spec.memory_bytes) == ("NVIDIA GeForce RTX 4090", 23 * GIB)
    assert (spec.memory_source, spec.capability, spec.num_multiprocessors) == ("the driver", (8, 9), 127)
    assert spec.flops_per_s == find_device("rtx4090").flops_per_s
    PlayedDevice(monkeypatch, "cuda", 23 * GIB, 0, name="Something Else")
    spec = describe_this_device()
    assert (spec.memory_bytes, spec.flops_per_s, spec.capability) == (23 * GIB, {}, None)


def test_without_an_accelerator_there_is_nothing_to_describe(monkeypatch):
    monkeypatch.setattr(accelerators, "current_kind", lambda: "cpu")
    message = "no GPU that reports its memory was found. Name a device instead, such as rtx4090."
    with pytest.raises(RuntimeError, match=re.escape(message)):
        describe_this_device()
