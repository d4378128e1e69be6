"""After a step is taken back there is no trace of it: not in the module, not in the generators."""

import random
import weakref
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from support.devices import DEVICE
from torch import nn

from lightning_vram.callbacks.micro_batching.step_state import StepState

CPU = torch.device("cpu")
LARGE = 1024 * 1024  # floats, above what is copied in every step


class Busy(nn.Module):
    """Does everything a forward may do to its module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 3)
        self.noise = torch.Generator().manual_seed(3)
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("empty", None)
        self.running = torch.zeros(3)
        self.losses = []
        self.long = list(range(2000))
        self.table = {"a": [1], "b": {"c": {1}}}
        self.seen = {number: str(number) for number in range(2000)}
        self.last = deque([1, 2], maxlen=2)
        self.flag = False
        self.ordered = OrderedDict(a=1)

    def forward(self, inputs):
        with torch.no_grad():
            self.count += 1
            self.running.data.add_(1)  # counts no version
            self.replaced = self.replaced + 1
            self.empty = torch.ones(1)
        self.losses.append(random.random() + np.random.rand())
        self.long.append(0)
        self.seen["new"] = "x"
        self.table["a"].append(2)
        self.table["b"]["c"].add(2)
        self.last.append(3)
        self.ordered.move_to_end("a")
        self.ordered["b"] = 2
        self.flag = True
        self.new = 1
        self.layer.eval()
        self.layer.weight.requires_grad_(False)
        self.handle = self.layer.register_forward_hook(lambda *_: None)
        self.noisy = torch.randn(3, generator=self.noise)
        return self.layer(self.norm(inputs)) + torch.rand(3)


def by_value(item):
    if isinstance(item, torch.Tensor):
        return item.tolist()
    if isinstance(item, torch.Generator):
        return item.get_state().tolist()
    if isinstance(item, dict):
        return {name: by_value(value) for name, value in item.items()}
    if isinstance(item, list | tuple):
        return [by_value(value) for value in item]
    return item.copy() if isinstance(item, set | deque) else item


def everything(module):
    attributes = [by_value(vars(member)) for member in module.modules()]
    requires_grad = [parameter.requires_grad for parameter in module.parameters()]
    numpy = by_value([part.tolist() if hasattr(part, "tolist") else part for part in np.random.get_state()])
    return attributes, requires_grad, torch.get_rng_state().tolist(), random.getstate(), numpy


def test_whatever_a_forward_does_is_taken_back_each_time():
    module = Busy()
    copies = StepState(module, CPU)
    for _ in range(2):  # the second state is taken with copies that are there
        before, objects = everything(module), dict(vars(module))
        buffers = dict(module.named_buffers())
        state = copies.take()
        for _ in range(2):
            module(torch.randn(4, 3))
            assert everything(module) != before
            state.restore()
            assert everything(module) == before
        assert all(vars(module)[name] is value for name, value in objects.items())
        assert all(buffers[name] is buffer for name, buffer in module.named_buffers())
        module.train()(torch.randn(4, 3))
        module.handle.remove()
        module.layer.weight.requires_grad_(True)


def make_batch():
    return {"x": torch.ones(4), "more": [torch.zeros(2)]}


def test_a_batch_is_lent_as_it_is_and_as_a_copy_where_it_counts_no_writes():
    state, batch = StepState(nn.Identity(), CPU), make_batch()
    state.take(batch)
    assert state.lend(batch) is batch
    state.settle()
    with torch.inference_mode():
        batch = make_batch()
        for _ in range(2):  # two tries
            state.take(batch)
            lent = state.lend(batch)
            assert torch.equal(lent["x"], torch.ones(4))
            lent["x"].mul_(2)
            state.restore()
    assert torch.equal(batch["x"], torch.ones(4))


def test_a_step_that_writes_into_its_batch_cannot_be_run_again():
    state, batch = StepState(nn.Identity(), CPU), make_batch()
    state.take(batch)
    state.lend(batch)["more"][0].add_(1)
    with pytest.raises(RuntimeError) as caught:
        state.restore()
    assert str(caught.value) == (
        "MicroBatching cannot retry this batch: training_step modified it in place. Write into a copy, or give a fixed "
        "size."
    )


class Table(nn.Module):
    """A large constant, and a large buffer that is written in one way or another."""

    def __init__(self, device="cpu") -> None:
        super().__init__()
        self.register_buffer("constant", torch.ones(LARGE, device=device))
        self.register_buffer("queue", torch.zeros(LARGE, device=device))


def write_in_place(module, value):
    module.queue.fill_(value)


def write_a_part(module, value):
    module.queue[:3] = value


def write_past_the_counter(module, value):
    module.queue.data.fill_(value)


def swap_memory(module, value):
    module.queue.data = torch.full_like(module.queue, value)


def resize(module, value):
    module.queue.data = torch.full((2 * LARGE,), value, device=module.queue.device)


def replace(module, value):
    module.queue = torch.full_like(module.queue, value)


WRITES = [write_in_place, write_a_part, write_past_the_counter, swap_memory, resize, replace]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("device", ["cpu", pytest.param(DEVICE, marks=pytest.mark.device)])
def test_large_buffers_come_back_and_go_on(write, device):
    module = Table(device)
    copies = StepState(module, torch.device(device))
    for _ in range(2 if write is not write_past_the_counter else 0):
        copies.take()  # by now it counts as a constant
    for step in range(4):
        state = copies.take()
        queue, value = module.queue, module.queue.clone()
        if step or write is not write_past_the_counter:  # found out in the second step
            for _ in range(2):
                write(module, -1.0)
                state.restore()
                assert module.queue is queue
                assert torch.equal(queue, value)
        write(module, float(step + 1))
    assert torch.equal(module.constant, torch.ones_like(module.constant))


def copied_bytes(module, copies):
    """Bytes written to copies while the state is taken."""
    total = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal total
            result = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
                total += args[0].nbytes
            elif func is torch.ops.aten._foreach_copy_.default:
                total += sum(tensor.nbytes for tensor in args[0])
            return result

    with Count():
        copies.take()
    return total


def test_large_constants_are_copied_once_and_small_buffers_each_time():
    module = Table()
    copies = StepState(module, CPU)
    module.register_buffer("small", torch.zeros(3))
    assert copied_bytes(module, copies) == 2 * 4 * LARGE + 12
    assert copied_bytes(module, copies) == 12
    module.queue[0] = 1
    assert copied_bytes(module, copies) == 4 * LARGE + 12
    assert copied_bytes(module, copies) == 12


def test_copies_serve_training_and_evaluation():
    module = nn.BatchNorm1d(3)
    copies = StepState(module, CPU)
    for mode in (True, False, True):
        with torch.inference_mode(mode=mode):
            state = copies.take()
            value = module.running_mean.clone()
            module(torch.randn(4, 3) + 5)
            state.restore()
            assert torch.equal(module.running_mean, value)


def add_hook(layer):
    layer.handle = layer.register_forward_hook(lambda *_: None)


def add_child(layer):
    layer.child = nn.Linear(1, 1)


def replace_forward(layer):
    layer.forward = lambda inputs: inputs


def change_option(layer):
    layer.p = 0.9
    layer.eval()


CHANGES = [add_hook, add_child, replace_forward, change_option]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("num_states", [1, 2])  # with what was learned about the layer, too
def test_what_a_step_puts_on_a_layer_of_torch_is_taken_off(change, num_states):
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    copies = StepState(module, CPU)
    before = everything(module)
    for _ in range(num_states):
        state = copies.take()
    for _ in range(2):
        for layer in module:
            change(layer)
        state.restore()
        assert everything(module) == before


def test_nothing_of_a_step_is_held_until_the_next_one():
    module = nn.Module()
    copies = StepState(module, CPU)
    module.losses = []
    for _ in range(2):
        module.past = torch.ones(3, requires_grad=True) * 2
        module.losses.append(module.past)
        past = weakref.ref(module.past)
        copies.take().settle()
        module.past = None
        module.losses.clear()
        assert past() is None
