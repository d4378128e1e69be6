"""A device with a time of its own: what is queued on its streams takes as long as it is told to; bytes move at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_vram.core.host import memory, transfers
from lightning_vram.core.host.transfers import TO_HOST, StreamCopies, copies_noted
from lightning_vram.techniques.activation_offload import items


class TimedStream:
    """When what was queued on it is over."""

    def __init__(self, machine: "TimedMachine") -> None:
        self.machine = machine
        self.seconds = 0.0

    def record_event(self) -> "TimedEvent":
        event = TimedEvent(self.machine)
        event.record(self)
        return event

    def wait_event(self, event: "TimedEvent") -> None:
        self.seconds = max(self.seconds, event.seconds)

    def wait_stream(self, other: "TimedStream") -> None:
        self.seconds = max(self.seconds, other.seconds)


class TimedEvent:
    def __init__(self, machine: "TimedMachine") -> None:
        self.machine = machine
        self.seconds = 0.0

    def record(self, stream: TimedStream) -> None:
        self.seconds = stream.seconds

    def query(self) -> bool:
        return self.seconds <= self.machine.compute.seconds

    def synchronize(self) -> None:
        self.machine.num_synchronized += 1


class TimedMachine:
    """What ``torch.cuda`` has, for one device; ``to_host`` and ``to_device`` are bytes per second of its bus."""

    def __init__(self, to_host: float, to_device: float) -> None:
        self.to_host, self.to_device = to_host, to_device
        self.compute = self.current = TimedStream(self)
        self.num_synchronized = 0

    def is_available(self) -> bool:  # torch.accelerator asks, where it was built for one
        return False

    def Stream(self, device: Any) -> TimedStream:  # noqa: N802
        return TimedStream(self)

    def current_stream(self, device: Any = None) -> TimedStream:
        return self.current

    @contextmanager
    def stream(self, stream: TimedStream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before

    def note_copy(self, way: str, num_bytes: int) -> None:
        self.current.seconds += num_bytes / (self.to_host if way == TO_HOST else self.to_device)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take tensors of the host for those of this device."""
        with pytest.MonkeyPatch.context() as patch, copies_noted(self.note_copy):
            patch.setattr(torch, "get_device_module", lambda _: self)
            patch.setattr(transfers, "note_use", lambda tensor, stream: None)
            patch.setattr(items, "make_copies", lambda tensor: StreamCopies(tensor.device))
            patch.setattr(memory, "make_host_bytes", lambda size, pin_memory: torch.empty(size, dtype=torch.uint8))
            yield

    def layer(self, x: Tensor, seconds: float) -> Tensor:
        """Save the result of a kernel that takes some time, and twice as long in the backward."""
        return _Layer.apply(x, self, seconds)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, machine: TimedMachine, seconds: float) -> Tensor:
        context.machine, context.seconds = machine, seconds
        machine.compute.seconds += seconds
        result = x.sin() * 1.1
        context.save_for_backward(result)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        (result,) = context.saved_tensors
        context.machine.compute.seconds += 2 * context.seconds
        return gradient * (1 - result * result / 2), None, None
