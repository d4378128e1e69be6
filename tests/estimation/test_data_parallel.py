"""DDP on ranks that are not there takes what it takes on two that are: its reducer's buckets."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from support.any_modules import Plain, rows
from torch.nn.parallel import DistributedDataParallel

from lightning_vram import EarlyRelease
from lightning_vram.estimation import estimate_memory
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.tracking.tracker import track_memory

WEIGHTS = sum(parameter.nbytes for parameter in Plain().parameters())


def _train(rank: int, store: str, arguments: dict[str, Any], results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    peaks = []
    for wrap in (lambda net: net, lambda net: DistributedDataParallel(net, **arguments)):
        module = Plain()
        with track_memory(module) as tracker:
            net = wrap(module.net)
            optimizer = torch.optim.AdamW(module.parameters())
            for _ in range(3):  # in the second forward buckets are made anew
                optimizer.zero_grad()
                net(rows(8)).square().mean().backward()
                optimizer.step()
        peaks.append(tracker.timeline.peak_bytes)
    if rank == 0:
        results.put(peaks[1] - peaks[0])
    dist.barrier()
    dist.destroy_process_group()


def real_excess(path: Path, **arguments: Any) -> int:
    """What DDP takes beside the same steps without."""
    context = mp.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_train, args=(rank, str(path / "store"), arguments, results)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    excess_bytes = results.get(timeout=100)
    for rank in ranks:
        rank.join()
    return excess_bytes


def estimate(strategy: Any, device: str = "cpu", devices: int = 2, **trainer: Any) -> Any:
    trainer = {"strategy": strategy, **trainer}
    return estimate_memory(Plain(), rows(8), device=device, trainer=trainer, devices=devices, find_limits=False)


@pytest.mark.distributed
@pytest.mark.slow_except("as_view")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["plain", "as_view"])
def test_as_on_two_processes(arguments, tmp_path):
    # Here, gradients are zeroed before the forward.
    early = {"callbacks": [EarlyRelease()]} if arguments else {}
    alone, together = estimate("auto", devices=1), estimate(DDPStrategy(**arguments), **early)
    # With views, what passes while a gradient is put in its place is not quite what passes in C++.
    differs_by = 0.02 * alone.peak_bytes if arguments else 0
    assert abs(together.peak_bytes - alone.peak_bytes - real_excess(tmp_path, **arguments)) <= differs_by


@pytest.mark.parametrize("strategy", [FSDPStrategy(), "deepspeed_stage_2"])
def test_strategies_that_need_a_card_of_their_own(strategy):
    with pytest.raises(ValueError, match=r"^estimate_memory cannot run the strategy .*'fsdp_offload', which shards"):
        estimate(strategy, "rtx4090")


@pytest.mark.parametrize("strategy", ["auto", "ddp_find_unused_parameters_true"])
def test_buckets_are_as_large_as_the_gradients(strategy):
    alone, together = estimate("auto", "rtx4090", devices=1), estimate(strategy, "rtx4090")
    assert together.peak_bytes - alone.peak_bytes == WEIGHTS
    assert together.by_category[Category.GRADIENTS] - alone.by_category[Category.GRADIENTS] == WEIGHTS
    assert together.world_size == 2
    assert not dist.is_initialized()
