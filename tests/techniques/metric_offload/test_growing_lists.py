"""Lists on a module that grow are found by their names and bytes."""

from collections import defaultdict, deque

import pytest
import torch
from torch import nn

from lightning_vram.techniques.metric_offload import GrowingList, GrowingLists

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
