"""What attributes hold, and which of them have grown from look to look."""

from collections import deque

import numpy as np
import torch
from torch import nn

from lightning_vram.memory.leaks.holders import GrowingAttributes, HeldMemory, iterate_attributes, read_attributes

KIB = 1024


def kib(number: int) -> torch.Tensor:
    return torch.zeros(number * KIB, dtype=torch.uint8)


def test_tensors_arrays_and_buffers_are_counted_once_and_parts_are_left_out():
    module = nn.Linear(64, 64)
    module.part = nn.Linear(64, 64)
    module.register_buffer("seen", kib(1))
    base = kib(4)
    module.views = [base[:8], {"tail": base[8:]}]
    module.arrays = [np.zeros(KIB), "text", None]
    module.few = deque([kib(1)], maxlen=9)
    module.looped = [kib(1)]
    module.looped.append(module.looped)
    assert read_attributes([("self", module)]) == {
        "self.seen": HeldMemory(KIB),
        "self.views": HeldMemory(4 * KIB, "list", 2),
        "self.arrays": HeldMemory(8 * KIB, "list", 3),
    }
    paths = {path for path, _ in iterate_attributes("self", module)}
    assert paths.isdisjoint({"self._parameters", "self._modules", "self._buffers"})


def test_what_has_no_attributes_has_none():
    assert read_attributes([("text", "text"), ("number", 1)]) == {}


class Growing:
    def __init__(self) -> None:
        self.sizes = {"steady": 1, "late": 0, "once": 1, "emptied": 5}
        self.seen = GrowingAttributes(self.read, KIB, step=10)

    def read(self):
        return {path: HeldMemory(size * KIB) for path, size in self.sizes.items() if size}

    def look(self, step: int, **sizes: int) -> dict[str, int]:
        self.sizes |= sizes
        return {path: num_bytes for path, (_, num_bytes) in self.seen.look(step).items()}


def test_only_what_grows_with_every_step_stays():
    growing = Growing()
    found = growing.look(14, steady=5, late=4, once=9, emptied=9)
    assert found == {"steady": KIB, "late": KIB, "once": 2 * KIB, "emptied": KIB}
    assert growing.look(16, steady=7, late=8, once=9, emptied=2) == {"steady": KIB, "late": 8 * KIB // 6}
    # what was let go once does not come back, and less than a KiB per step is too little
    assert growing.look(18, steady=8, late=10, once=50, emptied=50) == {"late": 10 * KIB // 8}
