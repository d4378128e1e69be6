"""Folders to which each rank writes its part: as Lightning's are, and written without a stray step."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies.model_parallel import _load_checkpoint
from support.checkpoint_nets import make_adamw, make_net, make_sgd, read_folder, run_ranks, train, whole
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from lightning_vram.techniques.sharded_checkpoints.folder import write_folder
from lightning_vram.techniques.sharded_checkpoints.states import sharded_module_state, sharded_optimizer_state

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


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


def test_lightning_reads_our_folders_and_we_read_its(tmp_path: Path):
    run_ranks(2, exchange_folders_with_lightning, tmp_path)


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


def test_what_is_not_sharded_is_rank_zeros_and_parameters_are_read_in_place(tmp_path: Path):
    run_ranks(2, save_rank_zeros_buffers, tmp_path)


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
