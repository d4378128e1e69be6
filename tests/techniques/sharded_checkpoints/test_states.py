"""States of sharded modules: whole ones of a plain module's form, and folders to which each rank writes its part."""

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies.model_parallel import _load_checkpoint
from support.checkpoint_nets import Block, make_adamw, make_net, make_sgd, read_folder, run_ranks, train, whole
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from torch.utils._pytree import tree_flatten

from lightning_vram.techniques.sharded_checkpoints.folder import write_folder
from lightning_vram.techniques.sharded_checkpoints.states import (
    gather_module_state,
    gather_optimizer_state,
    load_module_state,
    load_optimizer_state,
    map_leaves,
    match_parameters,
    sharded_module_state,
    sharded_optimizer_state,
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


def states(net: Any, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "state_dict": sharded_module_state(net),
        "optimizer_states": [sharded_optimizer_state(net, each) for each in optimizers],
    }


def make_folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    dist.barrier()
    return path


def exchange_folders_with_lightning(folder: Path) -> None:
    net = make_net()
    optimizer = make_adamw(net)
    train(net, optimizer, 2)
    ours, theirs = make_folder(folder / "ours"), make_folder(folder / "theirs")
    write_folder({**states(net, optimizer), "epoch": 1}, ours, None)
    options = StateDictOptions(cpu_offload=True)  # as ModelParallelStrategy saves
    converted = {
        "state_dict": get_model_state_dict(net, options=options),
        "optimizer_0": get_optimizer_state_dict(net, optimizer, options=options),
    }
    save(converted, checkpoint_id=theirs)
    if dist.get_rank() == 0:
        torch.save({"epoch": 1}, theirs / "meta.pt")
    dist.barrier()

    by_us = make_net(1)
    optimizer_by_us = make_adamw(by_us)
    assert read_folder(theirs, by_us, [optimizer_by_us], strict=True) == {"epoch": 1}
    by_them = make_net(2)
    optimizer_by_them = make_adamw(by_them)
    state = {"state_dict": by_them, "optimizer_0": optimizer_by_them}
    rest = _load_checkpoint(ours, state, optimizer_states_from_list=True)
    assert rest == {"epoch": 1}
    expected = train(net, optimizer, 2, first=2)
    assert train(by_us, optimizer_by_us, 2, first=2) == expected
    assert train(by_them, optimizer_by_them, 2, first=2) == expected


def save_rank_zeros_buffers(folder: Path) -> None:
    net = make_net()
    net.blocks[0].norm.running_mean.fill_(dist.get_rank() + 1.0)
    with torch.no_grad():
        net.scale.fill_(dist.get_rank() + 5.0)
    net.note = {"seen": dist.get_rank() + 7}
    path = make_folder(folder / "buffers")
    before = [p.to_local().data_ptr() for p in net.parameters() if isinstance(p, DTensor)]
    write_folder({**states(net), "rank": dist.get_rank()}, path, None)
    dist.barrier()
    assert read_folder(path, net, [], strict=True) == {"rank": 0}
    assert net.blocks[0].norm.running_mean.tolist() == [1.0] * 3
    assert net.scale.item() == 5.0
    assert net.note == {"seen": 7}
    assert before == [p.to_local().data_ptr() for p in net.parameters() if isinstance(p, DTensor)]


CHECKS = [
    gather_as_a_plain_module,
    load_in_place,
    refuse_what_does_not_fit,
    exchange_folders_with_lightning,
    save_rank_zeros_buffers,
]


@pytest.mark.parametrize("check", CHECKS)
def test_states_of_two_ranks(tmp_path: Path, check: Any):
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


# --- folders on one rank ---


def test_an_optimizer_that_never_stepped_has_no_state_to_save(one_rank: None, tmp_path: Path):
    net = make_net()
    steps = []
    optimizers = make_adamw(net), make_sgd(net)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    weights = [whole(p).clone() for p in net.parameters()]
    write_folder(states(net, *optimizers), make_folder(tmp_path / "f"), None)
    others = make_adamw(net), make_sgd(net)
    others[0].param_groups[1]["lr"] = 9.0
    read_folder(tmp_path / "f", net, list(others), strict=True)
    assert steps == []
    assert not others[0].state
    assert not others[1].state
    assert [group["lr"] for group in others[0].param_groups] == [1e-2, 2e-2]
    assert others[0].param_groups[0]["betas"] == (0.9, 0.999)
    assert all(torch.equal(whole(p), weight) for p, weight in zip(net.parameters(), weights, strict=True))


def test_a_folder_of_another_module_or_optimizer_is_refused(one_rank: None, tmp_path: Path):
    net = make_net()
    optimizer = make_adamw(net)
    path = make_folder(tmp_path / "f")
    state = states(net, optimizer)
    state["state_dict"]["left.over"] = state["state_dict"].pop("scale")
    write_folder(state, path, None)
    with pytest.raises(ValueError, match=r"it lacks scale; it has, unlike the module, left\.over\. Load"):
        read_folder(path, net, [], strict=True)
    read_folder(path, net, [optimizer], strict=False)
    first, second = (list(group["params"]) for group in optimizer.param_groups)
    sizes = [len(first), len(second)]
    for groups, found in [
        ([[net.scale]], "[1]"),
        ([second[:1] + first[1:], first[:1] + second[1:]], f"{sizes}, with other names"),
    ]:
        with pytest.raises(ValueError, match="parameters in its groups") as caught:
            read_folder(path, net, [SGD([{"params": group} for group in groups])], strict=False)
        assert str(caught.value) == (
            f"The checkpoint's optimizer has {sizes} parameters in its groups, SGD of configure_optimizers has {found}"
            ". Return the optimizer the checkpoint was saved with: the same parameters, in the same order."
        )
    with pytest.raises(ValueError, match="save_weights_only") as caught:
        read_folder(path, net, [optimizer, SGD([net.scale])], strict=False)
    assert str(caught.value) == ("The checkpoint has 1 optimizers (save_weights_only=True: none), the run 2.")


def test_a_parameter_of_nobody_has_no_name(one_rank: None):
    net = make_net()
    with pytest.raises(ValueError, match="has no name") as caught:
        sharded_optimizer_state(net, SGD([net.scale, torch.nn.Parameter(torch.ones(2))]))
    assert str(caught.value) == ("A parameter in group 0 of SGD has no name: save full checkpoints.")
