"""Checkpoints of sharded runs: saved by some ranks, loaded by others, and the training goes on as if nothing was."""

import pickle
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from support.checkpoint_nets import load, make_adamw, make_net, make_sgd, run_ranks, train
from torch import nn
from torch.optim import Optimizer

from lightning_vram.core.ranks import CheckpointError
from lightning_vram.strategies.fsdp_offload import checkpoints
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy
from lightning_vram.techniques.sharded_checkpoints import CheckpointStore
from lightning_vram.techniques.sharded_checkpoints import folder as sharded_folder
from lightning_vram.techniques.sharded_checkpoints.folder import consolidate, write_folder
from lightning_vram.techniques.sharded_checkpoints.states import (
    gather_module_state,
    gather_optimizer_state,
    sharded_module_state,
    sharded_optimizer_state,
)

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
KINDS = pytest.mark.parametrize("sharded", [False, True], ids=["full", "sharded"])


def make_store(sharded: bool, asynchronous: bool = False, timeout: timedelta | None = None) -> CheckpointStore:
    return CheckpointStore(sharded=sharded, asynchronous=asynchronous, timeout=timeout, remote=TorchCheckpointIO())


def dump(net: nn.Module, optimizer: Optimizer, sharded: bool) -> dict[str, Any]:
    if sharded:
        states = {
            "state_dict": sharded_module_state(net),
            "optimizer_states": [sharded_optimizer_state(net, optimizer)],
        }
    else:
        states = {"state_dict": gather_module_state(net), "optimizer_states": [gather_optimizer_state(optimizer)]}
    return {**states, "epoch": 3, "pytorch-lightning_version": "2.6.6"}


def meet_errors(folder: Path, sharded: bool) -> None:
    net, store = make_net(), make_store(sharded)
    optimizer = make_adamw(net)
    train(net, optimizer)
    path = folder / "last.ckpt"
    store.save(dump(net, optimizer, sharded), path)
    weights = gather_module_state(net)
    train(net, optimizer)
    failing, where = (1, "_write_item") if sharded else (0, "save")
    state, patch = dump(net, optimizer, sharded), pytest.MonkeyPatch()
    if dist.get_rank() == failing:
        owner = torch.distributed.checkpoint.filesystem if sharded else torch
        patch.setattr(owner, where, fail_as_a_full_disk)
    with pytest.raises(CheckpointError) as caught:
        store.save(state, path)
    patch.undo()
    assert str(caught.value) == (
        f"The checkpoint {path} could not be saved: OSError on rank {failing}: [Errno 28] No space left on device"
    )
    dist.barrier()
    assert [each.name for each in folder.iterdir() if "store" not in each.name] == ["last.ckpt"]
    load(store, path, net, [optimizer])
    for key, value in gather_module_state(net).items():
        assert torch.equal(value, weights[key]) if isinstance(value, torch.Tensor) else value == weights[key]
    dist.barrier()

    with pytest.raises(FileNotFoundError) as not_found:
        store.open(folder / "none.ckpt")
    assert str(not_found.value) == f"[Errno 2] No such file or directory: '{folder / 'none.ckpt'}'"
    (folder / "empty").mkdir(exist_ok=True)
    dist.barrier()
    with pytest.raises(FileNotFoundError) as not_found:
        store.open(folder / "empty")
    assert str(not_found.value) == f"[Errno 2] No such file or directory: '{folder / 'empty' / '.metadata'}'"
    with pytest.raises(IsADirectoryError) as no_checkpoint:
        store.save(dump(net, optimizer, sharded), folder)
    assert str(no_checkpoint.value) == (
        f"{folder} is a folder, but not a checkpoint, and is not overwritten. Choose another name."
    )


def fail_as_a_full_disk(*arguments: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
@KINDS
def test_errors_are_the_same_on_all_ranks_and_the_old_checkpoint_stays(tmp_path: Path, sharded: bool):
    run_ranks(2, meet_errors, tmp_path, sharded)


def save_beside_the_training(folder: Path, sharded: bool) -> None:
    net, store = make_net(), make_store(sharded, asynchronous=True)
    optimizer = make_adamw(net)
    train(net, optimizer, 3)
    first, second = folder / "first.ckpt", folder / "second.ckpt"
    gate, patch = threading.Event(), pytest.MonkeyPatch()
    prepare = sharded_folder.prepare_path  # before anything is written
    patch.setattr(sharded_folder, "prepare_path", lambda *paths: (gate.wait(30), prepare(*paths)))
    checkpoint = dump(net, optimizer, sharded)
    checkpoint["callbacks"] = {"scores": [1.0]}
    store.save(checkpoint, first)
    checkpoint["callbacks"]["scores"].append(2.0)
    expected = train(net, optimizer, 2, first=3)  # changes parameters and states in place
    assert not first.exists()
    dist.barrier()
    gate.set()
    store.wait()
    again = make_net(1)
    optimizer_again = make_adamw(again)
    assert load(store, first, again, [optimizer_again])["callbacks"] == {"scores": [1.0]}
    assert train(again, optimizer_again, 2, first=3) == pytest.approx(expected, abs=1e-6)

    gate.clear()
    store.save(dump(net, optimizer, sharded), second)
    store.remove(first)
    assert first.exists()
    dist.barrier()
    gate.set()
    store.wait()
    dist.barrier()
    assert (first.exists(), second.exists()) == (False, True)

    patch.setattr(sharded_folder, "publish", fail_as_a_full_disk)
    store.save(dump(net, optimizer, sharded), first)
    store.remove(second)
    with pytest.raises(CheckpointError, match="No space left on device"):
        store.save(dump(net, optimizer, sharded), folder / "third.ckpt")
    patch.undo()
    dist.barrier()
    assert (first.exists(), second.exists()) == (False, True)  # the last good one is not removed for one that failed
    store.save(dump(net, optimizer, sharded), folder / "third.ckpt")
    store.remove(folder / "third.ckpt")
    store.wait()
    dist.barrier()
    assert sorted(each.name for each in folder.iterdir() if "store" not in each.name) == ["second.ckpt"]


@pytest.mark.slow
@KINDS
def test_a_save_beside_the_training_sees_none_of_it(tmp_path: Path, sharded: bool):
    run_ranks(2, save_beside_the_training, tmp_path, sharded)


def save_beside_a_rank_that_hangs(folder: Path, sharded: bool) -> None:
    net, gate, patch = make_net(), threading.Event(), pytest.MonkeyPatch()
    store = make_store(sharded, asynchronous=True, timeout=timedelta(seconds=1))
    patch.setattr(sharded_folder, "prepare_path", lambda *paths: gate.wait(30))  # on rank 0 alone
    store.save(dump(net, make_adamw(net), sharded), folder / "last.ckpt")
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
            store.wait()
    dist.barrier()
    gate.set()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            store.wait()
    patch.undo()


def test_a_save_beside_the_training_waits_for_a_rank_as_long_as_it_was_told(tmp_path: Path):
    run_ranks(2, save_beside_a_rank_that_hangs, tmp_path, False)


def test_the_strategy_tells_it_its_timeout_and_whether_to_verify(monkeypatch: pytest.MonkeyPatch):
    made: dict[str, Any] = {}
    monkeypatch.setattr(checkpoints, "CheckpointStore", lambda **arguments: made.update(arguments))
    FSDPOffloadStrategy(timeout=12, async_save=True, verify=False)._make_store(asynchronous=True)
    assert (made["timeout"], made["verify"], made["asynchronous"]) == (timedelta(seconds=12), False, True)


def test_a_full_checkpoint_without_optimizers_is_refused_for_training(one_rank: None, tmp_path: Path):
    net, store = make_net(), make_store(sharded=False)
    store.save({"state_dict": gather_module_state(net)}, tmp_path / "weights.ckpt")
    load(store, tmp_path / "weights.ckpt", net)
    with pytest.raises(ValueError, match="save_weights_only") as caught:
        load(store, tmp_path / "weights.ckpt", net, [make_adamw(net)])
    assert str(caught.value) == ("The checkpoint has 0 optimizers (save_weights_only=True: none), the run 1.")


def test_a_file_of_bare_weights_is_no_checkpoint(one_rank: None, tmp_path: Path):
    net, store = make_net(), make_store(sharded=False)
    torch.save(gather_module_state(net), tmp_path / "bare.pt")
    with pytest.raises(ValueError, match="no state_dict") as caught:
        load(store, tmp_path / "bare.pt", net)
    assert str(caught.value) == "The file is not a Trainer checkpoint: it has no state_dict."


def test_an_opened_folder_says_whether_it_has_states_of_optimizers(one_rank: None, tmp_path: Path):
    """For Lightning, which refuses to go on from a checkpoint that was saved with ``save_weights_only``."""
    net, store = make_net(), make_store(sharded=True)
    checkpoint = dump(net, make_adamw(net), True)
    store.save(checkpoint, tmp_path / "all.ckpt")
    store.save({"state_dict": checkpoint["state_dict"], "epoch": 3}, tmp_path / "weights.ckpt")
    assert store.open(tmp_path / "all.ckpt")["optimizer_states"] == []
    assert store.open(tmp_path / "weights.ckpt") == {"epoch": 3}


def test_weights_only_reaches_torch(one_rank: None, tmp_path: Path):
    net = make_net()
    for sharded in (False, True):
        store, path = make_store(sharded), tmp_path / str(sharded)
        store.save({**dump(net, make_adamw(net), sharded), "odd": Path("x")}, path)
        with pytest.raises(pickle.UnpicklingError) as caught:
            load(store, path, net)
        assert str(caught.value) == (
            f"The checkpoint {path} could not be read: {'meta.pt' if sharded else path.name} contains "
            f"pathlib.PosixPath, and weights_only=True, the default, loads only tensors and basic types. If "
            f"you trust its source: trainer.fit(..., weights_only=False), or allow the class with "
            f"torch.serialization.add_safe_globals."
        )
        assert load(store, path, net, weights_only=False)["odd"] == Path("x")


def test_full_checkpoints_go_to_remote_places_and_sharded_ones_do_not(one_rank: None):
    net = make_net()
    optimizer = make_adamw(net)
    make_store(sharded=False).save(dump(net, optimizer, False), "memory://run/last.ckpt")
    store = make_store(sharded=False)
    assert load(store, "memory://run/last.ckpt", net, [optimizer])["epoch"] == 3
    store.remove("memory://run/last.ckpt")
    with pytest.raises(FileNotFoundError, match=r"last\.ckpt"):
        load(store, "memory://run/last.ckpt", net)
    with pytest.raises(ValueError, match="local path") as caught:
        make_store(sharded=True).save(dump(net, optimizer, True), "memory://run/last.ckpt")
    assert str(caught.value) == (
        "Sharded checkpoints need a local path, got 'memory://run/last.ckpt'. Save full checkpoints there."
    )


# --- one plain file made of a folder ---


def write_for_one(folder: Path) -> None:
    net = make_net()
    optimizers = make_adamw(net), make_sgd(net)
    train(net, optimizers[0], 2)
    states = [sharded_optimizer_state(net, optimizer) for optimizer in optimizers]
    (folder / "f").mkdir(exist_ok=True)
    dist.barrier()
    checkpoint = {"state_dict": sharded_module_state(net), "optimizer_states": states, "epoch": 4}
    write_folder(checkpoint, folder / "f", None)
    loss = train(net, optimizers[0], 2, first=2)
    if dist.get_rank() == 0:
        torch.save(loss, folder / "loss.pt")


def test_one_file_is_made_of_a_folder_for_a_plain_module(tmp_path: Path):
    run_ranks(2, write_for_one, tmp_path)
    consolidate(tmp_path / "f", tmp_path / "plain.ckpt")
    checkpoint = torch.load(tmp_path / "plain.ckpt")
    assert checkpoint["epoch"] == 4
    assert sorted(checkpoint) == ["epoch", "optimizer_states", "state_dict"]
    net = make_net(1, sharded=False)
    optimizers = make_adamw(net), make_sgd(net)
    net.load_state_dict(checkpoint["state_dict"])
    for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)
    assert len(optimizers[0].state) == len([p for p in net.parameters() if p.requires_grad])
    assert train(net, optimizers[0], 2, first=2) == pytest.approx(torch.load(tmp_path / "loss.pt"), abs=1e-6)


def test_progress_is_told_and_ctrl_c_leaves_the_file_that_was_there(tmp_path: Path):
    def stop(stage: str, done: float) -> None:
        if stage == "writing":
            raise KeyboardInterrupt

    run_ranks(1, write_for_one, tmp_path)
    output, told = tmp_path / "plain.ckpt", []
    output.write_text("before")
    names = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        consolidate(tmp_path / "f", output, on_progress=stop)
    assert output.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    consolidate(tmp_path / "f", output, on_progress=lambda *now: told.append(now))
    assert list(dict.fromkeys(stage for stage, _ in told)) == ["verifying checksums", "reading", "writing"]
    assert told[-1] == ("writing", 1.0)


def test_what_is_no_folder_is_not_consolidated(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as caught:
        consolidate(tmp_path, tmp_path / "out")
    assert str(caught.value) == f"{tmp_path} is not a sharded checkpoint: a folder with .metadata and meta.pt."
