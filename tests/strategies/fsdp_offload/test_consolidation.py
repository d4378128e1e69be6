"""One plain file made of the folder of a sharded run: a Trainer on one device goes on from it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.checkpoint_nets import make_adamw, make_net, make_sgd, run_ranks, train

from lightning_vram.techniques.sharded_checkpoints.folder import consolidate, write_folder
from lightning_vram.techniques.sharded_checkpoints.states import sharded_module_state, sharded_optimizer_state

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


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
