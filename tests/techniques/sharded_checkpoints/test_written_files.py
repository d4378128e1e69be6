"""Saves on a disk that is full: the error is that of the disk."""

import errno
from pathlib import Path

import pytest
import torch

from lightning_vram.techniques.sharded_checkpoints.folder import naming_disk_errors

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs the /dev/full of Linux")
def test_torch_says_what_the_disk_says():
    with (
        FULL.open("wb", buffering=0) as file,
        pytest.raises(OSError, match="No space left on device") as caught,
        naming_disk_errors(),
    ):
        torch.save({"a": torch.zeros(1000)}, file)
    assert caught.value.errno == errno.ENOSPC
