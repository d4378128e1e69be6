"""LeakDetector where the allocator of a device tells what is alive."""

import warnings

import pytest
from support import leaky_models as leaky
from support.devices import ACCELERATOR, DEVICE

from lightning_vram.callbacks.leak_detector import LeakDetector

pytestmark = pytest.mark.device


def fit(model, make_trainer):
    detector = LeakDetector(5, min_bytes_per_step=2048)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        make_trainer(callbacks=[detector], max_epochs=5, accelerator=ACCELERATOR, devices=1).fit(model)
    return detector.leaks


@pytest.mark.parametrize(("model", "path"), [(leaky.Outputs, "self.cache"), (leaky.Losses, "self.losses")])
def test_named_on_a_device(model, path, make_trainer):
    ((stage, leak),) = fit(model(), make_trainer)
    assert stage == "train"
    assert [holder.path for holder in leak.holders] == [path]


def test_nothing_is_reported_on_a_device(make_trainer, caplog):
    with caplog.at_level("INFO"):
        assert fit(leaky.Plain(), make_trainer) == []
    assert any(f"LeakDetector reads the allocated memory of {DEVICE}" in message for message in caplog.messages)
