"""``MicroBatching("auto")``: no fake card runs out of memory, so the estimate cuts until it fits."""

import pytest
from support.any_modules import Plain, rows

from lightning_vram.callbacks.micro_batching import MicroBatching
from lightning_vram.estimation import estimate_memory
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.units import MIB


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_batches_are_cut_until_they_fit():
    def estimate(memory_bytes, *callbacks):
        card = DeviceSpec("small", memory_bytes, context_bytes=0, capability=None)
        return estimate_memory(
            Plain(), rows(65536), device=card, trainer={"callbacks": list(callbacks)}, find_limits=False
        )

    memory_bytes = 60 * MIB
    assert not estimate(memory_bytes).fits
    auto = MicroBatching("auto")
    cut = estimate(memory_bytes, auto)
    assert cut.fits
    (note,) = (note for note in cut.notes if "MicroBatching" in note)
    assert note in [f"MicroBatching will run {65536 // 2**power} samples at once." for power in range(1, 6)]
    assert auto.size == "auto"
    whole = estimate(1000 * MIB, auto)
    assert not any("MicroBatching" in note for note in whole.notes)
    assert cut.peak_bytes < whole.peak_bytes
