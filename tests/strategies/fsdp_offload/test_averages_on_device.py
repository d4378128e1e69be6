"""Averages of weights under ``fsdp_offload`` on an accelerator: none of them is there."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging
from support.devices import ACCELERATOR, device_module
from support.offload_nets import MODES, Fused, leave_group

from lightning_vram.optimizers import averages
from lightning_vram.private_names.lightning import average_of
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

pytestmark = [pytest.mark.device, pytest.mark.distributed]


class Weighed(Fused):
    def on_train_batch_end(self, *unused: Any) -> None:
        self.seen.append(device_module().memory_allocated())


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_an_average_takes_nothing_of_the_device(mode, fit, monkeypatch):
    monkeypatch.setattr(averages, "PART_ELEMENTS", 512)
    average, seen = EMAWeightAveraging(decay=0.9), []
    for callbacks in ([average], []):
        strategy = FSDPOffloadStrategy(**{"min_params": 100, **mode})
        seen.append(fit(Weighed, *callbacks, strategy=strategy, accelerator=ACCELERATOR, devices=1).seen)
        leave_group()
    assert seen[0] == seen[1]
    assert {p.device.type for p in (*average_of(average).parameters(), *average_of(average).buffers())} == {"cpu"}
