"""To verify in the first step that batch norms are recomputed bit-exactly does not raise its peak."""

import torch
from support.helpers import TinyCNN

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.techniques.in_place_fusion.policy import Fusion, FusionPolicy


def measure_steps(num_steps: int) -> list[int]:
    """Peaks of the training steps of a small network with batch norms; its maps have 32 KiB."""
    torch.manual_seed(0)
    net, images = TinyCNN(), torch.randn(4, 3, 16, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fusion = Fusion(net, FusionPolicy(), lambda sentence: None)
    peaks = []
    for _ in range(num_steps):
        with track_memory(net, inputs=images) as tracker:
            with fusion.step():
                loss = net(images).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        peaks.append(tracker.timeline.peak_bytes)
    fusion.remove()
    return peaks


def test_the_first_step_has_the_peak_of_the_second():
    first, *others = measure_steps(3)
    assert others == [first] * 2
