"""The tracker against numbers worked out by hand, and against itself on fake tensors."""

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.helpers import assert_equal_weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from lightning_vram.memory.tracking.timeline import Allocation, Category, MemoryEvent, MemoryTimeline, Phase
from lightning_vram.memory.tracking.tracker import track_memory

FLOAT = 4
ROWS, WIDTH, HIDDEN = 16, 32, 64


def changes(timeline: MemoryTimeline) -> list[tuple[str, int]]:
    return [(timeline.allocations[event.allocation].op, event.change_bytes) for event in timeline.events]


def test_every_byte_of_a_small_program():
    layer = nn.Linear(WIDTH, HIDDEN, bias=False)
    batch = torch.ones(ROWS, WIDTH)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        loss = F.relu(layer(batch)).sum()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    with track_memory(layer, inputs=batch) as tracker:
        step()
    timeline = tracker.timeline
    weight, inputs, hidden = FLOAT * HIDDEN * WIDTH, FLOAT * ROWS * WIDTH, FLOAT * ROWS * HIDDEN
    assert changes(timeline) == [
        ("held", weight),
        ("held", inputs),
        ("aten.mm.default", hidden),
        ("aten.relu.default", hidden),
        ("aten.mm.default", -hidden),  # ReLU keeps its output, nobody its input
        ("aten.sum.default", FLOAT),
        ("aten.ones_like.default", FLOAT),  # the gradient of the loss
        ("aten.threshold_backward.default", hidden),  # from a view of it: expand copies nothing
        ("aten.relu.default", -hidden),
        ("aten.mm.default", weight),  # the gradient of the weight, kept
        ("aten.threshold_backward.default", -hidden),
        ("aten.ones_like.default", -FLOAT),
        ("aten.sum.default", -FLOAT),
        ("aten.clone.default", weight),  # momentum starts as a copy of the gradient
        ("aten.mm.default", -weight),  # zero_grad
    ]
    assert timeline.peak_bytes == 3 * weight + inputs  # in the optimizer's step
    assert timeline.peak_op == "aten.clone.default"
    assert timeline.peak_by_category == {
        Category.PARAMETERS: weight,
        Category.BUFFERS: 0,
        Category.GRADIENTS: weight,
        Category.OPTIMIZER_STATE: weight,
        Category.INPUTS: inputs,
        Category.ACTIVATIONS: 0,
        Category.TEMPORARIES: 0,
    }
    assert timeline.peak_by_phase == {
        Phase.FORWARD: 3 * weight + inputs,  # the gradient lives until zero_grad, which is no part of the step
        Phase.BACKWARD: 2 * weight + inputs + hidden + 2 * FLOAT,
        Phase.OPTIMIZER_STEP: 3 * weight + inputs,
    }
    assert timeline.saved_for_backward_bytes == hidden + 2 * FLOAT  # ReLU's output, the loss and its gradient
    assert timeline.live_bytes == 2 * weight + inputs
    assert timeline.host_peak_bytes == 0  # the host is the device
    assert timeline.devices == ("cpu",)


class Net(nn.Module):
    """Convolution, norm, attention, dropout and checkpointing: a bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.conv(images).flatten(2).transpose(1, 2)
        return self.head(checkpoint(self.block, tokens, use_reentrant=False).mean(1))


def run_two_steps(track: Callable[..., Any] = track_memory) -> tuple[Net, Any]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    batch, labels = torch.randn(4, 3, 10, 10), torch.zeros(4, dtype=torch.int64)
    with track(net, inputs=(batch, labels)) as tracker:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(batch), labels).backward()
            optimizer.step()
    return net, tracker


def test_weights_are_those_of_an_untracked_run():
    untracked, _ = run_two_steps(lambda net, inputs: nullcontext())
    assert_equal_weights(run_two_steps()[0], untracked)


def test_fake_tensors_give_the_timeline_of_real_ones_whose_sums_agree_with_one_another():
    timeline = run_two_steps()[1].timeline
    with FakeTensorMode():
        assert run_two_steps()[1].timeline == timeline
    assert sum(timeline.peak_by_category.values()) == timeline.peak_bytes
    assert sum(timeline.peak_by_module.values()) == timeline.peak_bytes
    assert max(timeline.peak_by_phase.values()) == timeline.peak_bytes
    assert sum(event.change_bytes for event in timeline.events) == timeline.live_bytes


def test_a_closure_runs_outside_of_the_step():
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss = layer(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    for step in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        optimizer.zero_grad()
        with track_memory(layer) as tracker:
            step()
        phases = {a.op: a.phase for a in tracker.timeline.allocations}
        assert phases["aten.addmm.default"] is Phase.FORWARD
        assert phases["aten.mm.default"] is Phase.BACKWARD


def test_recomputation_counts_as_backward_and_its_results_as_activations():
    layer = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    batch = torch.ones(16, 8, requires_grad=True)
    with track_memory(layer, inputs=batch) as tracker:
        checkpoint(layer, batch, use_reentrant=False).sum().backward()
    tanh = [a for a in tracker.timeline.allocations if a.op == "aten.tanh.default"]
    assert [(a.phase, a.category, a.module) for a in tanh] == [
        (Phase.FORWARD, Category.TEMPORARIES, "1"),
        (Phase.BACKWARD, Category.ACTIVATIONS, "1"),
    ]


def test_a_forward_alone_says_what_a_backward_would_find():
    layer = nn.Linear(8, 8)
    with track_memory(layer) as tracker:
        loss = torch.tanh(layer(torch.ones(4, 8))).sum()
    assert loss.requires_grad
    assert tracker.timeline.saved_for_backward_bytes == 2 * 4 * 8 * FLOAT + FLOAT
    with torch.no_grad(), track_memory(layer) as tracker:
        layer(torch.ones(4, 8))
    assert tracker.timeline.saved_for_backward_bytes == 0


def test_views_and_in_place_results_are_counted_once():
    with track_memory() as tracker:
        base = torch.zeros(8, 8)
        views = [base.view(64), base[1:], base.t(), base.detach()]
        base.add_(1).mul_(2)
        del base
        alive = tracker.timeline.live_bytes
        del views
    assert alive == 64 * FLOAT
    assert changes(tracker.timeline) == [("aten.zeros.default", 256), ("aten.zeros.default", -256)]


def test_growing_and_shrinking_storages():
    with track_memory() as tracker:
        tensor = torch.zeros(10)
        tensor.resize_(20)
        tensor.untyped_storage().resize_(0)  # what FSDP does; not an operator
        tensor.untyped_storage().resize_(8 * FLOAT)
        out = torch.empty(0)
        torch.add(torch.ones(5), 1, out=out)
    assert [change for _, change in changes(tracker.timeline)] == [40, 40, -80, 32, 20, 20, -20]


def test_host_and_device_are_apart():
    layer = nn.Linear(8, 8, bias=False, device="meta")  # stands for a device: any but the host will do
    with track_memory(layer) as tracker:
        host = torch.zeros(1000)
        layer(torch.zeros(4, 8, device="meta"))
    timeline = tracker.timeline
    assert timeline.device == "meta"
    assert timeline.devices == ("cpu", "meta")
    assert timeline.peak_bytes == (8 * 8 + 4 * 8 + 4 * 8) * FLOAT
    assert timeline.host_peak_bytes == timeline.on("cpu").peak_bytes == 1000 * FLOAT
    assert host.sum() == 0


def test_modules_own_what_is_made_in_them():
    net = nn.Sequential()
    net.add_module("wide", nn.Linear(4, 64, bias=False))
    net.add_module("narrow", nn.Linear(64, 2, bias=False))
    with track_memory(net) as tracker:
        net(torch.ones(8, 4)).sum().backward()
    by_module = {
        a.module for a in tracker.timeline.allocations if a.op == "aten.mm.default" and a.phase is Phase.FORWARD
    }
    assert by_module == {"wide", "narrow"}
    gradients = {a.module for a in tracker.timeline.allocations if a.category is Category.GRADIENTS}
    assert gradients == {"wide", "narrow"}


def test_leaves_nothing_behind():
    layer = nn.Linear(4, 4)
    resize, optimizers = torch.UntypedStorage.resize_, sys.modules["torch.optim.optimizer"]
    hooks = dict(optimizers._global_optimizer_pre_hooks), dict(optimizers._global_optimizer_post_hooks)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), track_memory(layer):
        layer(torch.ones(2, 5))
    assert gc.isenabled()
    assert _get_current_dispatch_mode() is None
    assert torch.UntypedStorage.resize_ is resize
    module = torch.nn.modules.module
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks
    assert hooks == (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)


def test_one_optimizer_without_a_list_and_a_second_time_are_refused():
    message = r"^track_memory\(optimizers\) must be a list of optimizers, got SGD\. Put one in a list: \[\.\.\.\]\.$"
    with pytest.raises(TypeError, match=message):
        track_memory(optimizers=torch.optim.SGD(nn.Linear(1, 1).parameters()))
    with track_memory() as tracker:
        pass
    message = r"^a memory tracker can be entered only once; call track_memory\(\) again"
    with pytest.raises(RuntimeError, match=message), tracker:
        pass


def test_operators_made_of_others_are_taken_apart_without_autograd():
    matrix = torch.randn(10, 20)
    with torch.inference_mode(), track_memory() as tracker:
        double = matrix.to(torch.float64)
        turned = matrix.t().contiguous()
        half = double.float().softmax(-1).half()
    assert tracker.timeline.live_bytes == 200 * (8 + 4 + 2)
    assert tracker.timeline.peak_bytes == 200 * (8 + 4 + 4 + 4)  # the copies of the last line
    assert turned.is_contiguous()
    assert half.dtype is torch.float16


def test_without_autograd_results_are_those_of_an_untracked_run():
    images, sequence, gru = torch.randn(2, 3, 11, 13), torch.randn(5, 2, 4), nn.GRU(4, 4, bidirectional=True)
    computations = {
        "bilinear": lambda: F.interpolate(images, size=(16, 16), mode="bilinear"),  # PyTorch has it in Python as well
        "gru": lambda: gru(sequence)[0],
        "attention": lambda: F.scaled_dot_product_attention(images, images, images),
    }
    for name, compute in computations.items():
        with torch.inference_mode():
            expected = compute()
            with track_memory():
                assert torch.equal(compute(), expected), name


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fsdp2_steps_are_alike(mesh):
    """Sharded parameters are wrapper subclasses; unsharded ones come from storages that are emptied and filled."""
    net = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 32, bias=False))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(net.parameters())
    batch = torch.ones(4, 32)
    timelines = []
    for _ in range(4):
        with track_memory(net, optimizers=[optimizer], inputs=batch) as tracker:
            net(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        timelines.append(tracker.timeline)
    assert timelines[2] == timelines[3]
    weight_bytes = 32 * 32 * FLOAT
    assert timelines[3].peak_by_category[Category.PARAMETERS] == 2 * weight_bytes
    assert timelines[3].peak_by_category[Category.OPTIMIZER_STATE] == 4 * weight_bytes + 2 * FLOAT


def test_what_no_operator_tells_is_noted():
    with track_memory() as tracker:
        batch = torch.empty(64)
        before = len(tracker.ledger.events)
        tracker.ledger.note_scratch("aten.mm.default", batch.device, [1000, 24])
        assert len(tracker.ledger.events) == before + 4
        buffer = torch.empty(16)
        tracker.ledger.note_pinned(buffer)
        tracker.label_inputs({"batch": [batch]})
        tracker.label_gradients([buffer])
        assert tracker.ledger.live_bytes[str(batch.device)] == 80 * FLOAT
    timeline = tracker.timeline
    assert changes(timeline)[before:] == [
        ("aten.mm.default (scratch)", 1000),
        ("aten.mm.default (scratch)", 24),
        ("aten.mm.default (scratch)", -24),
        ("aten.mm.default (scratch)", -1000),
        ("aten.empty.memory_format", 16 * FLOAT),
    ]
    first, *_, last = timeline.allocations
    assert (first.category, last.category) == (Category.INPUTS, Category.GRADIENTS)
    assert [one.is_pinned for one in timeline.allocations] == [False, False, False, True]
    assert timeline.pinned_peak_bytes == 16 * FLOAT
    assert timeline.peak_bytes == 64 * FLOAT + 1024


def allocation(op: str, category: Category, *, device: str = "cpu", is_pinned: bool = False) -> Allocation:
    return Allocation(op, "", Phase.FORWARD, category, device, is_pinned=is_pinned)


WEIGHT, KEPT, GRADIENT, PINNED = range(4)
TIMELINE = MemoryTimeline(
    allocations=(
        allocation("held", Category.PARAMETERS),
        allocation("aten.relu.default", Category.ACTIVATIONS),
        allocation("aten.mm.default", Category.GRADIENTS),
        allocation("aten.empty.default", Category.TEMPORARIES, is_pinned=True),
    ),
    events=(
        MemoryEvent(WEIGHT, 100, Phase.FORWARD),
        MemoryEvent(KEPT, 30, Phase.FORWARD),
        MemoryEvent(PINNED, 8, Phase.FORWARD),
        MemoryEvent(GRADIENT, 50, Phase.BACKWARD),
        MemoryEvent(KEPT, -30, Phase.BACKWARD),
        MemoryEvent(PINNED, 12, Phase.BACKWARD),
        MemoryEvent(PINNED, -20, Phase.OPTIMIZER_STEP),
    ),
    backward_starts=(3,),
    device="cpu",
)


def test_a_part_begins_with_what_is_alive_and_has_the_rest_of_the_events():
    part = TIMELINE.between(4, 6)
    assert part.events == (
        MemoryEvent(WEIGHT, 100, Phase.BACKWARD),
        MemoryEvent(KEPT, 30, Phase.BACKWARD),
        MemoryEvent(GRADIENT, 50, Phase.BACKWARD),
        MemoryEvent(PINNED, 8, Phase.BACKWARD),
        *TIMELINE.events[4:6],
    )
    assert part.live_bytes == 100 + 50 + 20
    assert part.backward_starts == ()


def test_parts_keep_the_starts_of_backwards_that_lie_in_them():
    part = TIMELINE.between(1, 7)
    assert part.backward_starts == (3,)  # one birth in the place of one event
    assert part.saved_for_backward_bytes == 30
    assert TIMELINE.between(3, 7).backward_starts == (3,)  # three births, and then the backward
    assert TIMELINE.between(0, 7) == TIMELINE
    assert {TIMELINE.between(start, 7).live_bytes for start in range(8)} == {TIMELINE.live_bytes}


def test_most_pinned_bytes_at_once():
    assert TIMELINE.pinned_peak_bytes == 20
    assert TIMELINE.between(0, 5).pinned_peak_bytes == 8
