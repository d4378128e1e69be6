"""Whole states of sharded modules: the form of a plain module's, and back into the parts where they lie."""

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoint_nets import Block, make_adamw, make_net, run_ranks, train, whole
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from lightning_vram.techniques.sharded_checkpoints.states import (
    gather_module_state,
    gather_optimizer_state,
    load_module_state,
    load_optimizer_state,
    map_leaves,
    match_parameters,
    snapshot,
)

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


def assert_same_tree(one: Any, other: Any, tolerance: float = 0.0) -> None:
    """Entries are in the same order, and of the same classes and values."""
    ours, theirs = tree_flatten(one), tree_flatten(other)
    assert ours[1] == theirs[1]
    for first, second in zip(ours[0], theirs[0], strict=True):
        assert type(first) is type(second)
        if isinstance(first, Tensor):
            torch.testing.assert_close(first, second, rtol=0, atol=tolerance)
        else:
            assert first == second


def storages(net: nn.Module) -> list[int]:
    tensors = (*net.parameters(), *net.buffers())
    return [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage().data_ptr() for t in tensors]


def plain_states(num_steps: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
    net = make_net(sharded=False)
    optimizer = make_adamw(net)
    train(net, optimizer, num_steps)
    return net.state_dict(), optimizer.state_dict()


def gather_as_a_plain_module(folder: Path) -> None:
    net = make_net(compiled=True)
    optimizer = make_adamw(net)
    train(net, optimizer, 2)
    module_state, optimizer_state = gather_module_state(net), gather_optimizer_state(optimizer)
    if dist.get_rank() == 0:
        train_state, plain_optimizer_state = plain_states()
        assert_same_tree(module_state, train_state, 1e-6)
        assert_same_tree(optimizer_state, plain_optimizer_state, 1e-6)
        assert module_state["embed.weight"] is module_state["head.weight"]  # the file holds it once
        assert module_state._metadata == train_state._metadata
    else:
        assert module_state == optimizer_state == {}


def load_in_place(folder: Path) -> None:
    module_state, optimizer_state = plain_states()
    if dist.get_rank() == 0:
        torch.save([module_state, optimizer_state], folder / "plain.pt")
    dist.barrier()
    module_state, optimizer_state = torch.load(folder / "plain.pt", mmap=True)
    net = make_net(1, compiled=True)
    optimizer, before = make_adamw(net), storages(net)
    keys = load_module_state(net, module_state, strict=True)
    load_optimizer_state(optimizer, optimizer_state)
    assert list(keys) == [[], []]
    assert storages(net) == before
    for state in optimizer.state.values():
        assert "exp_avg" in state
    for parameter, state in optimizer.state.items():
        assert type(state["exp_avg"]) is (DTensor if isinstance(parameter, DTensor) else Tensor)
        assert state["step"].item() == 2
        assert whole(state["exp_avg"]).shape == parameter.shape
    plain = make_net(sharded=False)
    plain_optimizer = make_adamw(plain)
    plain.load_state_dict(module_state)
    plain_optimizer.load_state_dict(torch.load(folder / "plain.pt")[1])
    assert train(net, optimizer, 2, first=2) == pytest.approx(train(plain, plain_optimizer, 2, first=2), abs=1e-6)
    fresh = torch.load(folder / "plain.pt")
    assert_same_tree(optimizer_state, fresh[1])  # steps do not write to what was loaded
    assert_same_tree({**module_state}, {**fresh[0]})


def refuse_what_does_not_fit(folder: Path) -> None:
    state = make_net(1, sharded=False).state_dict()
    state["head.bias"] = torch.zeros(7)
    state["left.over"] = torch.zeros(1)
    del state["scale"]
    net = make_net()
    before = {name: whole(value).clone() for name, value in net.named_parameters()}
    with pytest.raises(ValueError, match="does not fit") as caught:
        load_module_state(net, state, strict=True)
    assert str(caught.value) == (
        "The checkpoint does not fit the module: it lacks scale; it has, unlike the module, left.over; it "
        "has [7] for head.bias of shape [5]. Load it into the module it was saved from; with self.strict_loading "
        "= False names may be missing or additional."
    )
    with pytest.raises(ValueError, match=r"module: it has \[7\] for head.bias of shape \[5\]. Load"):
        load_module_state(net, state, strict=False)
    for name, value in net.named_parameters():
        assert torch.equal(whole(value), before[name])
    state["head.bias"] = torch.zeros(5)
    keys = load_module_state(net, state, strict=False)
    assert keys.missing_keys == ["scale"]
    assert keys.unexpected_keys == ["left.over"]
    assert not whole(net.head.bias).any()


@pytest.mark.parametrize("check", [gather_as_a_plain_module, load_in_place, refuse_what_does_not_fit])
def test_states_of_two_ranks_are_those_of_a_plain_module_and_others_are_refused(tmp_path: Path, check: Any):
    run_ranks(2, check, tmp_path)


def test_gathered_states_are_copies(one_rank: None):
    net = make_net()
    optimizer = make_adamw(net)
    train(net, optimizer)
    states = gather_module_state(net), gather_optimizer_state(optimizer)
    before = copy.deepcopy(states)
    train(net, optimizer)
    assert_same_tree(states, before)


def test_names_of_wrappers_are_left_out_and_put_in(mesh: DeviceMesh):
    def build(wrapped: bool) -> nn.Module:
        torch.manual_seed(int(wrapped))
        block = checkpoint_wrapper(Block()) if wrapped else Block()
        return nn.Sequential(torch.compile(block, backend="eager") if wrapped else block)

    plain, wrapped = build(wrapped=False), build(wrapped=True)
    fully_shard(wrapped, mesh=mesh)
    load_module_state(wrapped, plain.state_dict(), strict=True)
    assert_same_tree(gather_module_state(wrapped), plain.state_dict())
    load_module_state(
        wrapped, {f"0._orig_mod.{name[2:]}": value for name, value in plain.state_dict().items()}, strict=True
    )


def test_numbers_that_skip_and_take_turns_are_those_of_their_groups(one_rank: None):
    """Lightning's ``ModelParallelStrategy`` numbers parameters as the module has them, not as the optimizer does."""
    net = make_net()
    optimizer = make_adamw(net)
    train(net, optimizer)
    state = gather_optimizer_state(optimizer)
    other = {number: 13 - number for number in range(14)}
    renumbered = {
        "state": {other[number]: values for number, values in state["state"].items()},
        "param_groups": [{**g, "params": [other[number] for number in g["params"]]} for g in state["param_groups"]],
    }
    loaded = make_adamw(net)
    load_optimizer_state(loaded, match_parameters(net, loaded, renumbered))
    assert_same_tree(gather_optimizer_state(loaded)["param_groups"], state["param_groups"])
    for parameter, values in optimizer.state.items():
        assert torch.equal(whole(loaded.state[parameter]["exp_avg"]), whole(values["exp_avg"]))


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
