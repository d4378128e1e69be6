"""Lists that grow on a module are found, and lists stay on the host; fake tensors play those on a device."""

from collections import defaultdict, deque

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_vram.techniques.metric_offload import GrowingList, GrowingLists, copy_to, keep_on_host

HOST = torch.device("cpu")
KIB = 1024


def look_three_times(module, grow, device=HOST):
    lists, found = GrowingLists(module, device), []
    for _ in range(3):
        grow(module)
        found.append(lists.look())
    grow(module)
    assert lists.look() == []  # said once
    assert found[:2] == [[], []]
    return found[2]


@pytest.mark.parametrize("make", [list, deque])
def test_a_list_is_found(make):
    module = nn.Linear(2, 2)
    module.outputs = make()
    assert look_three_times(module, lambda m: m.outputs.append({"preds": torch.ones(512)})) == [
        GrowingList("outputs", 6 * KIB, 2 * KIB)
    ]


def test_lists_in_a_dict_are_found():
    module = nn.Linear(2, 2)
    module.outputs = defaultdict(list)
    assert look_three_times(module, lambda m: m.outputs["val"].append((torch.ones(256), 1))) == [
        GrowingList("outputs", 3 * KIB, KIB)
    ]


def test_views_of_one_memory_count_once_and_in_full():
    module, large = nn.Linear(2, 2), []
    module.outputs = []

    def grow(m):
        large.append(torch.ones(1024))
        m.outputs.extend([large[-1][:1], large[-1][1:2]])

    assert look_three_times(module, grow) == [GrowingList("outputs", 12 * KIB, 4 * KIB)]


@pytest.mark.parametrize(
    ("grow", "device"),
    [
        pytest.param(lambda m: m.outputs.append(torch.ones(255)), HOST, id="less than 1 KiB"),
        pytest.param(lambda m: m.outputs.append(torch.ones(512)), torch.device("meta"), id="elsewhere"),
        pytest.param(lambda m: setattr(m, "outputs", [torch.ones(512)]), HOST, id="replaced"),
        pytest.param(lambda m: m.outputs.append("text"), HOST, id="no tensors"),
        pytest.param(lambda m: m.register_buffer(f"b{len(m._buffers)}", torch.ones(512)), HOST, id="buffers"),
    ],
)
def test_what_does_not_grow_on_the_device_is_not(grow, device):
    module = nn.Linear(2, 2)
    module.outputs = []
    assert look_three_times(module, grow, device) == []


def kinds(items):
    return [leaf.device.type for leaf in torch.utils._pytree.tree_leaves(items) if isinstance(leaf, torch.Tensor)]


def test_what_was_added_moves_and_the_list_is_the_same():
    with FakeTensorMode():
        items = [torch.ones(2), torch.ones(2, device="cuda"), (torch.ones(2, device="cuda"), ["text"])]
        first, the_list = items[0], items
        keep_on_host(items)
        assert kinds(items) == ["cpu"] * 3
        assert items is the_list
        assert items[0] is first
        assert items[2][1] == ["text"]


def test_items_before_one_on_the_host_move_when_asked():
    with FakeTensorMode():
        items = [torch.ones(2, device="cuda"), torch.ones(2)]
        keep_on_host(items)
        assert kinds(items) == ["cuda", "cpu"]
        keep_on_host(items, looks_at_all=True)
        assert kinds(items) == ["cpu", "cpu"]


def test_a_tensor_on_the_host_stays_itself_without_its_graph():
    plain, with_graph = torch.ones(2), torch.ones(2, requires_grad=True) * 2
    items = [plain, with_graph]
    keep_on_host(items)
    assert items[0] is plain
    assert torch.equal(items[1], with_graph)
    assert not items[1].requires_grad


def test_only_tensors_are_copied():
    there = torch.ones(1, device="meta")
    values = copy_to(torch.device("meta"), {"a": (torch.ones(1), 2, "text"), "b": [there]})
    assert kinds(values) == ["meta", "meta"]
    assert values["a"][1:] == (2, "text")
    assert values["b"][0] is there
