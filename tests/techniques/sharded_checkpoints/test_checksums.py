"""Bytes that a disk has changed are not loaded."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_nets import load, make_net, run_ranks
from torch import nn

from lightning_vram.core.ranks import CheckpointError
from lightning_vram.techniques.sharded_checkpoints import CheckpointStore
from lightning_vram.techniques.sharded_checkpoints.folder import check_archive
from lightning_vram.techniques.sharded_checkpoints.states import sharded_module_state

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
WAY_OUT = "Resume from another checkpoint, or load this one without the check: verify=False."


def make_store(*, sharded: bool, verify: bool = True) -> CheckpointStore:
    return CheckpointStore(sharded=sharded, asynchronous=False, verify=verify)


def save(net: nn.Module, path: Path, *, sharded: bool) -> None:
    state: dict[str, Any] = sharded_module_state(net) if sharded else make_net(sharded=False).state_dict()
    make_store(sharded=sharded).save({"state_dict": state, "epoch": 3}, path)


def flip(path: Path, bytes_of: torch.Tensor) -> None:
    """Change one bit of a tensor, wherever it lies."""
    data = bytearray(path.read_bytes())
    place = data.index(bytes_of.numpy().tobytes())
    data[place + 1] ^= 0x10
    path.write_bytes(data)


def refusal(path: Path, net: nn.Module, *, sharded: bool) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(make_store(sharded=sharded), path, net)
    return str(caught.value).removeprefix(f"The checkpoint {path} could not be read: ")


def shard_of(path: Path, rank: int = 0) -> Path:
    (file,) = path.glob(f"__{rank}_*.distcp")
    return file


def test_a_flipped_bit_of_a_shard_is_refused(one_rank: None, tmp_path: Path):
    net, path = make_net(), tmp_path / "a.ckpt"
    save(net, path, sharded=True)
    before = net.frozen.weight.full_tensor().clone()
    flip(shard_of(path), before.detach())
    flipped = make_net(1)
    own = flipped.frozen.weight.full_tensor().clone()
    assert refusal(path, flipped, sharded=True) == (
        f"{shard_of(path).name} is damaged (Bad CRC-32 for file 'archive/data/0'). {WAY_OUT}"
    )
    assert torch.equal(flipped.frozen.weight.full_tensor(), own)
    load(make_store(sharded=True, verify=False), path, flipped)
    assert not torch.equal(flipped.frozen.weight.full_tensor(), before)


def test_a_flipped_bit_of_a_file_is_refused(one_rank: None, tmp_path: Path):
    net, path = make_net(1), tmp_path / "a.ckpt"
    save(net, path, sharded=False)
    flip(path, make_net(sharded=False).embed.weight.detach())
    assert refusal(path, net, sharded=False) == f"a.ckpt is damaged (Bad CRC-32 for file 'archive/data/1'). {WAY_OUT}"
    load(make_store(sharded=False, verify=False), path, net)


def test_ranks_share_the_entries(tmp_path: Path):
    path = tmp_path / "a.pt"
    tensors = {str(size): torch.full((size,), float(size)) for size in (10, 20, 30)}
    torch.save(tensors, path)
    for tensor in tensors.values():
        flip(path, tensor)
    num_parts = len(zipfile.ZipFile(path).namelist())  # one for each
    found = []
    for part in range(num_parts):
        try:
            check_archive(path, part, num_parts)
        except CheckpointError as error:
            found.append(str(error))
    assert sorted(found) == [f"a.pt is damaged (Bad CRC-32 for file 'a/data/{n}'). {WAY_OUT}" for n in range(3)]


def refuse_a_missing_shard(folder: Path) -> None:
    path = folder / "a.ckpt"
    save(make_net(), path, sharded=True)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shard_of(path, 1).unlink()
    torch.distributed.barrier()
    with pytest.raises(FileNotFoundError, match=r"__1_.*\.distcp"):
        make_store(sharded=True).open(path)


def test_all_ranks_refuse_what_one_has_found(tmp_path: Path):
    run_ranks(2, refuse_a_missing_shard, tmp_path)


def test_what_was_cut_off_is_named(one_rank: None, tmp_path: Path):
    net, path = make_net(), tmp_path / "a.ckpt"
    save(net, path, sharded=True)
    shard = shard_of(path)
    shard.write_bytes(shard.read_bytes()[:-100])
    assert refusal(path, net, sharded=True) == f"{shard.name} is damaged (File is not a zip file). {WAY_OUT}"
