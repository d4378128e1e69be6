"""The context against what out-of-memory messages tell, and cuBLAS's workspaces by their rules."""

from dataclasses import replace

import pytest

from lightning_vram.memory.estimate import workspaces
from lightning_vram.memory.estimate.device_spec import DeviceSpec, find_device
from lightning_vram.memory.estimate.workspaces import workspaces_of
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
