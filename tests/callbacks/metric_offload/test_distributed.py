"""MetricOffload on two ranks: plain values, over a group of the host where the ranks' own takes no tensors of it."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.metric_models import METRICS, Detections, LitMetrics, assert_equal_values
from torchmetrics import Metric

from lightning_vram.callbacks.metric_offload import MetricOffload
from lightning_vram.callbacks.metric_offload.callback import OffloadedMetric, list_states
from lightning_vram.techniques.metric_offload import host_group

pytestmark = pytest.mark.distributed
GATHERED = ["auroc", "detections", "average precision", "cat", "other states", "collection", "minmax", "classwise"]


@pytest.mark.filterwarnings("ignore:.*recommended to use .self.log.*sync_dist")
def test_logged_values_are_those_of_the_plain_run(make_trainer):
    logged = []
    for callbacks in ([], [MetricOffload()]):
        torch.manual_seed(0)
        trainer = make_trainer(callbacks=callbacks, strategy="ddp_fork", devices=2, max_epochs=1)
        trainer.fit(LitMetrics(METRICS["auroc"], "log"))
        logged.append(trainer.callback_metrics)
    assert_equal_values(*logged)


def offload(module: torch.nn.Module) -> list[OffloadedMetric]:
    metrics = [part for part in module.modules() if isinstance(part, Metric) and list_states(part)]
    return [OffloadedMetric(metric) for metric in metrics]


def feed(metric: Metric, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    one_less = 0 if isinstance(metric, Detections) else rank  # items of lists that are not joined are gathered by turn
    for size in (4, 3)[: 2 - one_less]:  # one rank has more batches
        metric.update(torch.rand(size, generator=generator), torch.arange(size) % 2)


def gather(rank: int, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", 2), rank=rank, world_size=2)
    without_host = dist.new_group([0, 1], backend="cuda:gloo")  # as NCCL's: it knows no tensors on the host
    for name in GATHERED:
        plain, ours = METRICS[name](), METRICS[name]()
        feed(plain, rank)
        offloaded = offload(ours)
        for one in offloaded:
            one.metric.process_group = without_host
        feed(ours, rank)
        num_local = [len(state) for one in offloaded for state in one._lists().values()]
        assert_equal_values(ours.compute(), plain.compute())
        assert [len(state) for one in offloaded for state in one._lists().values()] == num_local  # its own again
    assert host_group(without_host) is host_group(without_host)  # one for all metrics
    assert host_group() is dist.group.WORLD
    plain = METRICS["cat"]()
    plain.process_group = without_host
    feed(plain, rank)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        plain.compute()  # else this shows nothing
    dist.destroy_process_group()


def test_ranks_whose_backend_takes_no_host_tensors_gather_over_gloo(tmp_path):
    mp.start_processes(gather, (str(tmp_path),), nprocs=2, start_method="fork")


def gather_from_one(rank: int, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", 2), rank=rank, world_size=2)
    values = []
    for is_ours in (False, True):
        metric = METRICS["cat"]()
        offloaded = offload(metric) if is_ours else []
        if rank == 0:
            feed(metric, rank)
        metric.sync()
        values.append(metric.value)
        metric.unsync()
        assert len(metric.value) == (2 if rank == 0 else 0)
        for one in offloaded:
            one.remove()
    assert_equal_values(values[1], values[0])
    dist.destroy_process_group()


def test_a_rank_without_data_and_sync_by_hand(tmp_path):
    mp.start_processes(gather_from_one, (str(tmp_path),), nprocs=2, start_method="fork")
