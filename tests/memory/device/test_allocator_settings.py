import pytest
import torch

from lightning_vram.memory.device import accelerators
from lightning_vram.memory.device.accelerators import (
    SETTING,
    VARIABLES,
    configure_allocator,
    fragmentation_advice,
    has_expandable_segments,
)

GIB = 1 << 30


@pytest.fixture
def cuda_build(monkeypatch):
    """As on a machine with CUDA, which is not in use yet."""
    for name in (*VARIABLES, "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
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


@pytest.mark.parametrize(("version", "platform"), [(None, "linux"), ("13.0", "win32")])
def test_where_segments_cannot_expand_nothing_is_set(monkeypatch, version, platform):
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(accelerators.sys, "platform", platform)
    environment = {}
    assert not configure_allocator(environment)
    assert environment == {}


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize(
    ("allocated", "reserved", "is_said"),
    [(10 * GIB, 12 * GIB, True), (10 * GIB, 11 * GIB, False), (1 << 20, 100 << 20, False)],
)
def test_advice_where_much_is_reserved_and_not_used(monkeypatch, allocated, reserved, is_said):
    advice = fragmentation_advice(allocated, reserved)
    assert (advice is not None) is is_said
    if is_said:
        assert "12.00 GiB" in advice
        assert SETTING in advice
    monkeypatch.setenv(VARIABLES[0], SETTING)
    assert has_expandable_segments()
    assert fragmentation_advice(allocated, reserved) is None
