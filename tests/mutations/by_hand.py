"""Copies between device and host, one at a time: who waits for which, and whose memory is used again."""

from typing import Any

import torch
from mutations.hostile import patient
from support.devices import DEVICE, device_module
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from lightning_vram.core.host.transfers import StreamCopies
from lightning_vram.techniques.mixed_precision.loss_scaling import LossScaling

NUM_BYTES = 4096
WINDOW = 2**30  # of bytes: nothing is let go of before it is over


def full(value: int) -> Tensor:
    return torch.full((NUM_BYTES,), value, dtype=torch.uint8, device=DEVICE)


def empty() -> Tensor:
    return torch.empty(NUM_BYTES, dtype=torch.uint8, device=DEVICE)


def pinned(value: int = 0) -> Tensor:
    return torch.full((NUM_BYTES,), value, dtype=torch.uint8).pin_memory()


def make_copies() -> StreamCopies:
    return StreamCopies(torch.device(DEVICE, 0))


def new_stream() -> Any:
    return device_module().Stream(torch.device(DEVICE, 0))


def there_and_back() -> list[Tensor]:
    """What is sent is computed before, its memory used again afterwards; what is fetched takes used memory."""
    copies, piece = make_copies(), pinned()
    source = full(1).add_(2)
    copies.send(source, [piece], window_bytes=0)
    del source
    other = full(9)
    junk = torch.full((NUM_BYTES,), 7, dtype=torch.uint8, device=DEVICE).add_(1)
    del junk
    target = empty()
    copies.fetch([piece], target, copies.mark()).wait(target)
    return [other.cpu(), (target + 1).cpu()]


def written_in_place() -> list[Tensor]:
    """The computation writes to what is on its way."""
    copies, piece = make_copies(), pinned()
    source = full(3)
    departure = copies.send(source, [piece], WINDOW)
    departure.precede()
    source.add_(1)
    departure.wait()
    return [source.cpu(), piece.clone()]


def read_on_the_host() -> list[Tensor]:
    """The host reads what was sent."""
    piece = pinned()
    make_copies().send(full(3), [piece], WINDOW).wait()
    return [piece.clone()]


def staged() -> list[Tensor]:
    """The host writes again to memory that was fetched from."""
    copies, piece, target = make_copies(), pinned(3), empty()
    arrival = copies.fetch([piece], target, copies.mark())
    arrival.finish()
    piece.fill_(9)
    arrival.wait(target)
    return [(target + 1).cpu()]


def nobody_wants_it() -> list[Tensor]:
    """What comes is dropped before it is there, by all but the copies."""
    with patient():
        copies, piece = make_copies(), pinned(3)
        copies.fetch([piece], empty(), copies.mark())
        copies.settle()
        first = full(9)
        copies.close()
        second = full(8)
        return [first.cpu(), second.cpu()]


def sent_for_another_stream() -> list[Tensor]:
    """What is sent was made on a stream that goes on."""
    copies, piece, other = make_copies(), pinned(), new_stream()
    with device_module().stream(other):
        source = full(3)
    device_module().current_stream().wait_stream(other)
    departure = copies.send(source, [piece], window_bytes=0)
    del source
    with device_module().stream(other):
        again = full(9)
    departure.wait()
    other.synchronize()
    return [piece.clone(), again.cpu()]


def fetched_for_another_stream() -> list[Tensor]:
    """What is fetched is read on another stream than its memory was made on."""
    copies, piece, other = make_copies(), pinned(3), new_stream()
    target = empty()
    arrival = copies.fetch([piece], target, copies.mark())
    with device_module().stream(other):
        arrival.wait(target)
        read = target + 1
    with patient(0):
        copies.settle()
    del target, arrival
    again = full(9)
    other.synchronize()
    return [read.cpu(), again.cpu()]


def made_for_another_stream() -> list[Tensor]:
    """What the computation makes is read on another stream."""
    copies, other = make_copies(), new_stream()
    made = full(3)
    arrival = copies.note_made(made)
    with device_module().stream(other):
        arrival.wait(made)
        read = made + 1
    other.synchronize()
    return [read.cpu()]


def overflow_with_the_scale_on_the_host() -> list[Tensor]:
    """The loss is on the host, and gradients are on the device."""
    weight = nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaling = LossScaling(GradScaler(DEVICE, init_scale=8.0), [optimizer])
    scaling.scale((weight * float("inf")).sum().cpu()).backward()
    scaling.step(optimizer)
    return [torch.tensor(scaling.num_overflowed), weight.detach().cpu()]
