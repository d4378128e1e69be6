"""The context against what out-of-memory messages tell, cuBLAS's workspaces by their rules, and both as measured."""

import re
from dataclasses import replace

import pytest
import torch
from support.devices import DEVICE, device_module

from lightning_vram.memory.device.accelerators import AllocatorBytes
from lightning_vram.memory.estimate import workspaces
from lightning_vram.memory.estimate.device_spec import DeviceSpec, find_device, read_calibration, write_calibration
from lightning_vram.memory.estimate.workspaces import calibrate, workspaces_of
from lightning_vram.memory.units import GIB, MIB

MESSAGES = [  # card, "this process has" GiB, "allocated by PyTorch" GiB, "reserved but unallocated" MiB, where
    ("t4", 14.53, 14.42, 8.63, "mbzuai-oryx/GeoPixel/issues/5"),
    ("t4", 10.40, 10.23, 44.39, "QwenLM/Qwen3-VL/issues/1046"),
    ("rtx4060", 7.46, 7.13, 222.82, "ESRSchao/EdgeRegNet/issues/2"),
    ("rtx4090", 22.69, 21.72, 520.54, "pinokiofactory/flux-webui/issues/11"),
    ("rtx4090", 21.61, 21.16, 11.05, "Soul-AILab/SoulX-FlashTalk/issues/5"),
    ("l40", 11.13, 10.25, 394.50, "NVlabs/Eagle/issues/68"),
    ("l40s", 44.29, 43.88, 0.57, "stepfun-ai/Step-Video-T2V/issues/8"),
    ("a100 40gb", 14.25, 12.87, 912.01, "TianheWu/CoSeR/issues/10"),
    ("rtx5090", 26.89, 25.95, 343.86, "TrajectoryCrafter/TrajectoryCrafter/issues/20"),
    ("rtx5090", 31.34, 30.74, 19.41, "Wan-Video/Wan2.1/issues/465"),
]


@pytest.fixture(params=[True, False], ids=["kept", "for each product"])
def is_kept(request, monkeypatch):
    monkeypatch.setattr(workspaces, "_allocates_for_each_product", lambda: not request.param)
    return request.param


@pytest.mark.parametrize(("card", "used", "allocated", "cached", "where"), MESSAGES)
def test_the_context_is_about_what_messages_tell(card, used, allocated, cached, where):
    told_bytes = (used - allocated) * GIB - cached * MIB
    estimated_bytes = workspaces_of(find_device(card)).context_bytes
    # the card of 24 multiprocessors has little, of which 0.01 GiB of the message's rounding is much
    assert estimated_bytes == pytest.approx(told_bytes, rel=0.3, abs=35 * MIB)


def test_the_context_of_an_unknown_card_is_half_a_gigabyte():
    spec = DeviceSpec("mine", 8 * GIB)
    assert workspaces_of(spec).context_bytes == 500 * MIB
    assert workspaces_of(spec).notes == (
        "The CUDA context is a rule of thumb, within 30 %: `lightning-vram calibrate` measures it.",
        "Workspaces of mine are not known, and not counted.",
    )


@pytest.mark.parametrize(
    ("card", "num_bytes"),
    [("t4", 8_519_680), ("h100", 32 * MIB), ("rtx5090", 32 * MIB)],
)
def test_cublas_takes_workspaces_by_the_generation_of_the_card(card, num_bytes, is_kept):
    found = workspaces_of(find_device(card), {})
    if is_kept:
        assert found.persistent_bytes["aten.mm.default"] == found.persistent_bytes["aten.bmm.default"] == (num_bytes,)
        assert found.persistent_bytes["aten.addmm.default"] == (num_bytes, MIB)
        assert found.scratch_bytes == {}
    else:
        assert found.persistent_bytes == {}
        assert found.scratch_bytes["aten.mm.default"] == found.scratch_bytes["aten.bmm.default"] == num_bytes
        assert found.scratch_bytes["aten.addmm.default"] == MIB


def test_the_environment_sets_the_workspace(is_kept):
    assert workspaces_of(find_device("h100"), {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}).persistent_bytes
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8:16:2"}
    found = workspaces_of(find_device("h100"), environment)
    num_bytes = (4096 * 8 + 16 * 2) * 1024
    assert (found.persistent_bytes if is_kept else found.scratch_bytes)["aten.mm.default"] in (num_bytes, (num_bytes,))


def test_what_was_measured_overrules(is_kept):
    spec = replace(
        find_device("rtx4090"), context_bytes=300 * MIB, workspace_bytes=5 * MIB, is_workspace_kept=not is_kept
    )
    found = workspaces_of(spec, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    assert (found.context_bytes, found.notes) == (300 * MIB, ())
    assert bool(found.persistent_bytes) is not is_kept
    assert (found.scratch_bytes if is_kept else found.persistent_bytes)["aten.mm.default"] in (5 * MIB, (5 * MIB,))


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
