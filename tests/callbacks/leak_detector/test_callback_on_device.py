"""LeakDetector where the allocator of a device tells what is alive."""

import warnings

import pytest
from support import leaky_models as leaky
from support.devices import ACCELERATOR, DEVICE

from lightning_vram.callbacks.leak_detector import LeakDetector


@pytest.mark.device
def test_what_a_device_allocates_is_counted(make_trainer, caplog):
    detector = LeakDetector(5, min_bytes_per_step=2048)
    for model, paths in ((leaky.Outputs(), ["self.cache"]), (leaky.Plain(), [])):
        with warnings.catch_warnings(), caplog.at_level("INFO"):
            warnings.simplefilter("ignore", UserWarning)
            make_trainer(callbacks=[detector], max_epochs=5, accelerator=ACCELERATOR, devices=1).fit(model)
        assert [holder.path for _, leak in detector.leaks for holder in leak.holders] == paths
    assert any(f"LeakDetector reads the allocated memory of {DEVICE}" in message for message in caplog.messages)
