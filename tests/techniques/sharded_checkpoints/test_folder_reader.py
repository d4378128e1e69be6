"""Folders that somebody else has written: nothing in their pickles is run."""

import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.checkpoint_nets import make_adamw, make_net, read_folder, train
from support.evil import Evil
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.optim import Optimizer

from lightning_vram.core.ranks import CheckpointError
from lightning_vram.private_names.checkpoints import read_metadata
from lightning_vram.techniques.sharded_checkpoints.folder import ShardedFolder, consolidate, write_folder
from lightning_vram.techniques.sharded_checkpoints.states import sharded_module_state, sharded_optimizer_state

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def trained(one_rank: None) -> tuple[nn.Module, Optimizer]:
    net = make_net()
    optimizer = make_adamw(net)
    train(net, optimizer)
    return net, optimizer


@pytest.fixture
def folder(trained: tuple[nn.Module, Optimizer], tmp_path: Path) -> Path:
    net, optimizer = trained
    path = tmp_path / "a.ckpt"
    path.mkdir()
    states = [sharded_optimizer_state(net, optimizer)]
    write_folder({"state_dict": sharded_module_state(net), "optimizer_states": states, "epoch": 1}, path, None)
    return path


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "was_run"
    assert not (tmp_path / "was_run").exists()


def plant(folder: Path, value: object) -> None:
    """Let all entries that are no tensors be ``value``, as somebody would who knows the format."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    data = io.BytesIO()
    torch.save(value, data)
    (shard,) = folder.glob("__0_*.distcp")
    with shard.open("ab") as file:
        offset = file.tell()
        file.write(data.getvalue())
    for entry, place in index.storage_data.items():
        if isinstance(index.state_dict_metadata[entry.fqn], BytesStorageMetadata):
            place.offset, place.length = offset, data.tell()
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def test_the_index_is_read_as_torch_reads_it(folder: Path):
    with (folder / ".metadata").open("rb") as file:
        read = read_metadata(file)
    theirs = FileSystemReader(folder).read_metadata()
    assert read.state_dict_metadata == theirs.state_dict_metadata
    assert read.storage_data == theirs.storage_data
    assert read.planner_data == theirs.planner_data


class Member:
    """As Python 3.11 pickles members of an Enum."""

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (torch.distributed.checkpoint.metadata.MetadataIndex, "__init__")


def change_name(folder: Path) -> object:
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data["state_dict.scalf"] = index.planner_data.pop("state_dict.scale")
    return index


@pytest.mark.parametrize(
    ("make_index", "found"),
    [
        (lambda folder: Evil(folder.parent / "was_run"), "UnpicklingError: it holds posix.mkdir"),
        (lambda _: Member(), "UnpicklingError: it holds builtins.getattr"),
        (change_name, "KeyError: 'an entry is not described'"),
    ],
    ids=["evil", "member of an Enum", "changed name"],
)
def test_an_index_that_would_run_something_or_is_damaged_is_refused(folder: Path, mark: Path, make_index, found):
    (folder / ".metadata").write_bytes(pickle.dumps(make_index(folder)))
    message = f"The checkpoint {folder} could not be read: .metadata is damaged or not a checkpoint ({found})"
    for weights_only in (None, True, False):
        with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
            ShardedFolder(folder, weights_only=weights_only)
    with pytest.raises(CheckpointError, match=re.escape(found)):
        consolidate(folder, folder.parent / "whole.ckpt")


def test_an_entry_that_would_run_something_does_not(folder: Path, trained: tuple[nn.Module, Optimizer], mark: Path):
    plant(folder, Evil(mark))
    net, optimizer = trained
    for weights_only in (None, True):
        with pytest.raises(
            pickle.UnpicklingError,
            match=r"could not be read: .* contains posix\.mkdir, and weights_only=True, the default, loads only",
        ):
            read_folder(folder, net, [optimizer], strict=True, weights_only=weights_only)
        with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
            consolidate(folder, folder.parent / "whole.ckpt", weights_only=weights_only)


def test_what_the_user_trusts_is_read(folder: Path, trained: tuple[nn.Module, Optimizer]):
    plant(folder, folder)  # a path is of a class
    read_folder(folder, trained[0], [], strict=True, weights_only=False)
    assert trained[0].note == {"seen": folder}
