"""An error of one rank is an error of all, with the same words."""

import pickle
from pathlib import Path

import pytest
import torch.distributed as dist
from support.checkpoint_nets import run_ranks
from torch.distributed.checkpoint.api import CheckpointException

from lightning_vram.core.ranks import CheckpointError, on_all_ranks

pytestmark = pytest.mark.distributed


def fail_on_rank_1(folder: Path) -> None:
    def fail(error: BaseException) -> int:
        if dist.get_rank() == 1:
            raise error
        return dist.get_rank()

    with pytest.raises(CheckpointError) as caught:
        on_all_ranks(lambda: fail(OSError(28, "No space left on device")), "It could not be saved")
    assert str(caught.value) == "It could not be saved: OSError on rank 1: [Errno 28] No space left on device"
    assert isinstance(caught.value.__cause__, OSError) == (dist.get_rank() == 1)
    with pytest.raises(FileNotFoundError) as caught_kind:
        on_all_ranks(lambda: fail(FileNotFoundError("gone")), "It could not be read")
    assert str(caught_kind.value) == "gone"
    collected = CheckpointException("failed", {1: (KeyError("a"), None)})
    with pytest.raises(CheckpointError) as caught:
        on_all_ranks(lambda: fail(collected), "It could not be read")
    assert str(caught.value) == "It could not be read: KeyError on rank 1: 'a'"
    with pytest.raises(pickle.UnpicklingError, match="It could not be read: Weights only"):
        on_all_ranks(lambda: fail(pickle.UnpicklingError("Weights only")), "It could not be read")
    assert on_all_ranks(dist.get_rank, "It could not be read") == dist.get_rank()


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path):
    run_ranks(2, fail_on_rank_1, tmp_path)


def test_one_process_needs_no_group():
    with pytest.raises(CheckpointError, match="It failed: OSError on rank 0: full"):
        on_all_ranks(lambda: (_ for _ in ()).throw(OSError("full")), "It failed")
    assert on_all_ranks(lambda: 3, "It failed") == 3
