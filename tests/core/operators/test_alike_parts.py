"""One part of a fake tensor stands for all of its size."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vram.core.operators import operator_work, parts_of
from lightning_vram.private_names.dispatcher import FakeTensorMode


class Work(TorchDispatchMode):
    num_bytes = num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        work = operator_work(func, args, kwargs or {}, result)
        if work.num_bytes:
            self.num_bytes, self.num_calls = self.num_bytes + work.num_bytes, self.num_calls + work.num_calls
        return result


def double(numbers):
    seen = []
    with Work() as work:
        for part in parts_of(len(numbers), 3, numbers):
            numbers[part].mul(2)
            seen.append((part.start, part.stop))
    return work, seen


def test_the_work_of_a_fake_is_that_of_a_real_tensor():
    numbers = torch.ones(11, 4)
    real, seen = double(numbers)
    with FakeTensorMode() as mode:
        fake, of_fake = double(mode.from_tensor(numbers))
    assert seen == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert of_fake == [(0, 3), (9, 11)]
    assert (fake.num_bytes, fake.num_calls) == (real.num_bytes, real.num_calls) == (2 * 11 * 4 * 4, 4)
