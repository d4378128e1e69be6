"""Activations that are offloaded to the host and to a disk, of a small network on the accelerator."""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mutations.by_hand import NUM_BYTES, WINDOW, empty, full, make_copies, new_stream
from mutations.hostile import patient
from support.devices import DEVICE, device_module
from torch import Tensor, nn

from lightning_vram.core.host.disk import DiskRing
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading

NUM_STEPS = 3


class Network(nn.Module):
    """Tensors that one operator after the other saves; every second one overwrites what it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu_() + x.tanh()
        return x


def _steps(**options: Any) -> list[Tensor]:
    network = Network().to(DEVICE)
    offloading = ActivationOffloading(network, min_offload_bytes=1024, **options)
    batches = torch.randn(NUM_STEPS, 16, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for batch in batches:
        with offloading:
            loss = network(batch).square().mean()
        loss.backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    offloading.close()
    return [gradient.cpu() for gradient in gradients if gradient is not None]


def steps_offloaded() -> list[Tensor]:
    """Nothing stays on the device, and memory is used again at once."""
    return _steps(window_bytes=0)


def written_beside_its_copy() -> list[Tensor]:
    """A stage inside writes to what was saved, and is on its way."""
    with patient():
        network, source = Network().to(DEVICE), torch.full((32, 32), 3.0, device=DEVICE)
        offloading = ActivationOffloading(network, min_offload_bytes=1024, window_bytes=WINDOW)
        with offloading:
            handle = offloading.take(source)
            assert handle is not None
            handle.before_write()
            source.add_(1)
        given = handle.give()
        results = [(given + 1).cpu(), source.cpu()]
        offloading.close()
        return results


def _with_ring(use: Any) -> list[Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        ring = DiskRing(Path(folder), pin_memory=True, staging_bytes=NUM_BYTES // 4)
        try:
            return use(ring)
        finally:
            ring.close()


def _by_disk(ring: DiskRing) -> list[Tensor]:
    copies, source = (
        make_copies(),
        torch.arange(NUM_BYTES, device=DEVICE).div_(16, rounding_mode="floor").to(torch.uint8),
    )
    block = ring.write(source, copies, window_bytes=0)
    del source
    other, target = full(9), empty()
    ring._worker.submit(partial(time.sleep, 0.05))  # the thread is late
    block.read(target, make_copies, copies.mark()).wait(target)
    return [other.cpu(), (target + 1).cpu()]


def by_disk() -> list[Tensor]:
    """In four parts, through one buffer on the way back."""
    return _with_ring(_by_disk)


def _from_disk_for_another_stream(ring: DiskRing) -> list[Tensor]:
    copies, other = make_copies(), new_stream()
    block = ring.write(full(3), copies, window_bytes=0)
    target = empty()
    arrival = block.read(target, make_copies, copies.mark())
    with device_module().stream(other):
        arrival.wait(target)
        read = target + 1
    with patient(0):
        ring._worker.drain()
    del target, arrival
    again = full(9)
    other.synchronize()
    return [read.cpu(), again.cpu()]


def from_disk_for_another_stream() -> list[Tensor]:
    """What is read from disk is used on another stream than its memory was made on."""
    return _with_ring(_from_disk_for_another_stream)
