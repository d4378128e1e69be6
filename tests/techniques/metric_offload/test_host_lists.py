"""Lists that stay on the host; fake tensors play those on a device."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_vram.techniques.metric_offload import copy_to, keep_on_host


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
