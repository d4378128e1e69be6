"""Copies of state dicts that nothing changes afterwards."""

from collections import OrderedDict

import torch
from support.checkpoint_nets import make_net
from torch.distributed.tensor import DTensor

from lightning_vram.techniques.sharded_checkpoints.states import map_leaves, snapshot


def test_a_snapshot_shares_nothing_with_what_it_was_taken_of(one_rank: None):
    class Progress:
        step = 1

    sharded = make_net().head.bias
    tree = {"a": [torch.ones(2), (sharded, 3)], "b": Progress(), "c": {"step": [1]}}
    copied = snapshot(tree)
    expected = sharded.full_tensor().clone()
    tree["a"][0].zero_()
    with torch.no_grad():
        sharded.zero_()
    tree["b"].step = 2
    tree["c"]["step"].append(2)
    assert torch.equal(copied["a"][0], torch.ones(2))
    assert isinstance(copied["a"][1][0], DTensor)
    assert torch.equal(copied["a"][1][0].full_tensor(), expected)
    assert copied["b"].step == 1
    assert copied["c"] == {"step": [1]}


def test_classes_and_attributes_of_dicts_stay():
    state = OrderedDict(a=1)
    state._metadata = {"": {"version": 2}}
    mapped = map_leaves(state, lambda leaf: leaf + 1)
    assert type(mapped) is OrderedDict
    assert (mapped, mapped._metadata) == (OrderedDict(a=2), state._metadata)
