"""Saves on a disk that is full: the error is that of the disk."""

import errno
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from lightning_vram.core.ranks import CheckpointError
from lightning_vram.memory.units import GIB
from lightning_vram.techniques.sharded_checkpoints.files import naming_full_disk, save_values

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs the /dev/full of Linux")
def test_torch_says_what_the_disk_says():
    with FULL.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left on device") as caught:
        save_values({"a": torch.zeros(1000)}, file)
    assert caught.value.errno == errno.ENOSPC


def test_another_error_of_torch_stays(tmp_path: Path):
    with (tmp_path / "a").open("wb") as file, pytest.raises(RuntimeError, match="of torch"):
        save_values(Refusing(), file)


class Refusing:
    def __reduce__(self) -> tuple[object, ...]:
        raise RuntimeError("of torch")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EDQUOT, "quota"),
        CheckpointException("failed", {1: (OSError(errno.ENOSPC, "full"), None)}),
    ],
    ids=["full", "quota", "of another rank"],
)
def test_a_full_disk_is_named_with_what_was_asked_and_free(tmp_path: Path, monkeypatch, error: BaseException):
    def fail() -> None:
        raise error

    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": GIB // 2}))
    with pytest.raises(CheckpointError) as caught:
        naming_full_disk(fail, tmp_path, 3 * GIB)
    assert str(caught.value) == (
        f"the disk of {tmp_path} is full: the checkpoint needs 3.00 GiB, and 512.00 MiB were free. Free some "
        f"space, or save to another disk. A previous checkpoint of this name is unchanged."
    )


def test_another_error_of_the_disk_stays(tmp_path: Path):
    def fail() -> None:
        raise PermissionError(errno.EACCES, "no")

    with pytest.raises(PermissionError):
        naming_full_disk(fail, tmp_path, 1)
