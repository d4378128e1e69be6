import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_vram.precision.plugin import resolve_precision

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")


@pytest.mark.parametrize(
    ("device_type", "why"),
    [("meta", "unsupported autocast device_type"), pytest.param("cuda", "CUDA is not available", marks=NO_CUDA)],
)
@pytest.mark.parametrize(("name", "other"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_a_device_without_autocast_is_refused_in_its_own_words(device_type, why, name, other):
    message = rf"\(precision='{name}'\) does not work on '{device_type}' devices: .*{why}.*Use '{other}'"
    with pytest.raises(MisconfigurationException, match=message):
        resolve_precision({"fp16": "16-mixed", "bf16": "bf16-mixed"}[name], device_type)


@pytest.mark.parametrize(("is_native", "precision"), [(True, "bf16-mixed"), (False, "16-mixed")])
def test_auto_asks_for_hardware_not_for_emulation(is_native, precision, monkeypatch):
    def is_bf16_supported(including_emulation=True):
        return is_native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch, "autocast", lambda device_type, dtype: None)
    assert resolve_precision(None, "cuda") == precision


def test_auto_is_fp16_on_mps():
    assert resolve_precision(None, "mps") == "16-mixed"
