"""One plain file made of the folder of a sharded run: a Trainer on one device goes on from it."""

from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from support.checkpoint_nets import load, make_adamw, make_net, make_sgd, run_ranks, train
from support.helpers import LitTiny, TinyCNN, assert_equal_weights
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from lightning_vram.techniques.sharded_checkpoints import CheckpointStore
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


@pytest.mark.parametrize("last", ["verifying checksums", "reading", "writing"])
def test_progress_is_told_and_ctrl_c_leaves_the_file_that_was_there(tmp_path: Path, last: str):
    def on_progress(stage: str, done: float) -> None:
        told.append((stage, done))
        if stage == last:
            raise KeyboardInterrupt

    run_ranks(1, write_for_one, tmp_path)
    output, told = tmp_path / "plain.ckpt", []
    output.write_text("before")
    names = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        consolidate(tmp_path / "f", output, on_progress=on_progress)
    assert output.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    last = "nothing"
    consolidate(tmp_path / "f", output, on_progress=on_progress)
    assert list(dict.fromkeys(stage for stage, _ in told)) == ["verifying checksums", "reading", "writing"]
    assert told[-1] == ("writing", 1.0)
    assert "state_dict" in torch.load(output)


def test_what_is_no_folder_is_not_consolidated(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as caught:
        consolidate(tmp_path, tmp_path / "out")
    assert str(caught.value) == f"{tmp_path} is not a sharded checkpoint: a folder with .metadata and meta.pt."


def test_a_trainer_a_sharded_run_and_a_trainer_take_turns(
    mesh: DeviceMesh, make_trainer: Callable[..., pl.Trainer], tmp_path: Path
):
    def build() -> LitTiny:
        pl.seed_everything(0, verbose=False)
        return LitTiny(TinyCNN())

    def fit(model: LitTiny, num_epochs: int, checkpoint: Path | None = None) -> pl.Trainer:
        data = TinyCNN().samples(12)
        torch.manual_seed(1)
        trainer = make_trainer(max_epochs=num_epochs)
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        trainer.fit(model, loader, ckpt_path=checkpoint)
        return trainer

    through, torch_data = build(), torch.random.get_rng_state()
    fit(through, 2)
    torch.random.set_rng_state(torch_data)
    first = build()
    fit(first, 1).save_checkpoint(tmp_path / "plain.ckpt")

    sharded = build()
    fully_shard(sharded, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = sharded.configure_optimizers()
    store = CheckpointStore(sharded=True, asynchronous=False)
    rest = load(store, tmp_path / "plain.ckpt", sharded, [optimizer])
    states = [sharded_optimizer_state(sharded, optimizer)]
    store.save({**rest, "state_dict": sharded_module_state(sharded), "optimizer_states": states}, tmp_path / "folder")
    consolidate(tmp_path / "folder", tmp_path / "again.ckpt")
    last = build()
    fit(last, 2, tmp_path / "again.ckpt")
    assert_equal_weights(last, through)
