"""Features on devices that are not here: what an Apple GPU, a GB10, a ROCm build or a fast link changes."""

import copy
import re
from contextlib import ExitStack

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import ForkingOffload, LitTiny, TinyCNN, TinyGPT, write_files
from support.pages import rows_of, section
from support.parts import ROOT
from support.planned_models import LitGPT
from support.played_devices import MPS_MESSAGE, PLAY, PlayedDevice, apple, gb10, gh200, proven, proves, rocm, xpu
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryAUROC

from lightning_vram import (
    ActivationCheckpointing,
    ActivationOffload,
    AutoVRAM,
    EmptyCache,
    MemoryBudget,
    MetricOffload,
    MicroBatching,
    VRAMMonitor,
    estimate_memory,
    plan_memory,
)
from lightning_vram.callbacks import hook_points
from lightning_vram.core.host.transfers import copies_noted
from lightning_vram.memory.device import accelerators
from lightning_vram.memory.device.accelerators import (
    AllocatorBytes,
    PeakWatch,
    ProcessLimit,
    empty_cache,
    free_device_bytes,
    limited_share,
    shares_host_memory,
)
from lightning_vram.memory.device.out_of_memory import FailedRequest, OutOfMemorySource
from lightning_vram.memory.estimate.device_spec import DeviceSpec, describe_this_device, find_device
from lightning_vram.memory.estimate.workspaces import _allocates_for_each_product
from lightning_vram.memory.host import reclaimable_gpu_bytes
from lightning_vram.memory.units import GIB, MIB
from lightning_vram.report.out_of_memory import CAUSES, OutOfMemory, Place, Work

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")


@proves("free memory", "Apple")
def test_the_room_of_an_apple_gpu_is_what_the_host_has(monkeypatch):
    mps = apple(monkeypatch, available=5 * GIB)
    mps.live, mps.reserved = 2 * GIB, 3 * GIB
    assert shares_host_memory(mps.device)
    assert free_device_bytes(mps.device) == 6 * GIB  # with its own cache
    mps.available = 30 * GIB
    assert free_device_bytes(mps.device) == 20 * GIB  # Metal recommends no more than 22 in all
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.5")
    assert free_device_bytes(mps.device) == 9 * GIB
    assert empty_cache(mps.device) == GIB


def test_peaks_of_an_apple_gpu_are_the_most_that_was_read(monkeypatch):
    mps = apple(monkeypatch)
    watch = PeakWatch(mps.device)
    for live, reserved in ((5, 6), (9, 12), (4, 12)):
        mps.live, mps.reserved = live * GIB, reserved * GIB
        now = watch.read()
    assert now == AllocatorBytes(4 * GIB, 12 * GIB, 9 * GIB, 12 * GIB)
    watch.restart()
    assert watch.read() == AllocatorBytes(4 * GIB, 12 * GIB, 4 * GIB, 12 * GIB)


def test_the_limit_of_an_apple_gpu_is_put_back(monkeypatch):
    mps = apple(monkeypatch)
    limit = ProcessLimit(mps.device, 11 * GIB)
    assert limited_share(mps.device) == 0.5
    assert free_device_bytes(mps.device) == 11 * GIB
    limit.remove()
    assert mps.limits == [0.5, 1.7]  # PyTorch's own
    assert limited_share(mps.device) == 1


@proves("free memory", "GB10, Jetson")
def test_page_cache_is_free_where_cpu_and_gpu_share_memory(monkeypatch):
    spark = gb10(monkeypatch)
    assert shares_host_memory(spark.device)
    assert abs(free_device_bytes(spark.device) - spark.available) < 0.01 * spark.available
    spark.live = spark.reserved = 10 * GIB  # the driver has no more than all of it
    assert free_device_bytes(spark.device) == spark.total - 10 * GIB


@proves("free memory", "AMD")
@pytest.mark.parametrize(("total_gib", "is_shared"), [(64, True), (96, False)])
def test_an_apu_with_memory_of_its_own_does_not_share_it(monkeypatch, total_gib, is_shared):
    """Strix Halo: of 128 GiB, 96 may be set apart, and are no memory of the host."""
    monkeypatch.setattr(accelerators, "total_host_bytes", lambda: 80 * GIB)
    apu = rocm(monkeypatch, total_gib * GIB, is_integrated=1)
    apu.free = 40 * GIB
    assert shares_host_memory(apu.device) is is_shared
    assert free_device_bytes(apu.device) == (50 if is_shared else 40) * GIB


@proves("free memory", "GH200")
def test_page_cache_in_the_memory_of_a_gh200_is_free(monkeypatch, tmp_path):
    played = gh200(monkeypatch)
    played.free = 60 * GIB
    assert not shares_host_memory(played.device)
    assert free_device_bytes(played.device) == 60 * GIB  # where the driver manages it alone
    files = {
        "proc/driver/nvidia/gpus/0009:01:00.0/numa_status": "Node:          1\nStatus:        online\n",
        "sys/devices/system/node/node1/meminfo": (
            "Node 1 MemFree: 1 kB\nNode 1 Active(file):  4194304 kB\nNode 1 Inactive(file):  20971520 kB\n"
        ),
    }
    root = write_files(tmp_path, files)
    monkeypatch.setattr(accelerators, "reclaimable_gpu_bytes", lambda address: reclaimable_gpu_bytes(address, root))
    assert free_device_bytes(played.device) == (60 + 20 + 2) * GIB


@proves("free memory", "Intel")
@pytest.mark.parametrize("is_integrated", [False, True])
def test_the_room_of_an_intel_gpu(monkeypatch, is_integrated):
    played = xpu(monkeypatch, is_integrated_gpu=is_integrated)
    played.free = 8 * GIB
    assert shares_host_memory(played.device) is is_integrated
    assert free_device_bytes(played.device) == (12 if is_integrated else 8) * GIB
    assert describe_this_device("xpu").shares_host_memory is is_integrated


def tiny():
    return LitTiny(TinyCNN())


class Varied(LitTiny):
    """Batches of many shapes: an Apple GPU keeps the blocks of each, as in pocket-tts#255."""

    def __init__(self, played: PlayedDevice, growth: int, activations: int = 2 * GIB) -> None:
        super().__init__(TinyCNN())
        self.played, self.growth, self.activations, self.reserved = played, growth, activations, []
        played.live = played.reserved = 6 * GIB

    def training_step(self, batch, batch_idx):
        self.played.live += self.activations
        self.played.reserved = max(self.played.reserved + self.growth, self.played.live)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        self.played.live -= self.activations

    def on_train_batch_end(self, *_):
        self.reserved.append(self.played.reserved)

    def train_dataloader(self):
        return DataLoader(self.net.samples(12), batch_size=1)


@proves("EmptyCache", "Apple")
def test_an_apple_gpu_keeps_little_more_than_a_step_needs(fit, monkeypatch):
    mps = apple(monkeypatch)
    alone = fit(lambda: Varied(mps, growth=5 * GIB), **mps.trainer_arguments())
    assert max(alone.reserved) == 66 * GIB
    emptied = fit(lambda: Varied(mps, growth=5 * GIB), EmptyCache(), **mps.trainer_arguments())
    assert max(emptied.reserved) <= 1.5 * 8 * GIB + 5 * GIB
    assert mps.releases == 6  # after every second of 12 batches: 6, 11 and 16 of 8 GiB


def test_a_step_that_reuses_its_blocks_keeps_them(fit, monkeypatch):
    mps = apple(monkeypatch)
    fit(lambda: Varied(mps, growth=0), EmptyCache(), MicroBatching(1), **mps.trainer_arguments())
    assert mps.releases == 0


@proves("VRAMMonitor", "Apple")
def test_a_monitor_tracks_an_apple_gpu_and_reads_what_the_driver_holds(fit, monkeypatch):
    on_host = VRAMMonitor(path=None)
    fit(tiny, on_host)
    mps, monitor = apple(monkeypatch), VRAMMonitor(path=None)
    mps.reserved = 9 * GIB
    with pytest.warns(UserWarning, match=r"^VRAMMonitor: 9\.00 GiB were reserved.*callbacks=\[EmptyCache\(\)\]\.$"):
        fit(tiny, monitor, **mps.trainer_arguments())
    found, expected = monitor.peaks["train"], on_host.peaks["train"]
    assert found.peak_allocated_bytes == expected.peak_allocated_bytes
    assert found.peak_by_phase == expected.peak_by_phase
    assert (found.device, found.source, found.peak_reserved_bytes) == ("mps:0", "tracker", 9 * GIB)


CUDA_MESSAGE = (
    "{} out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which 1.00 GiB is free. "
    "Of the allocated memory 13.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)
MESSAGES = {
    "Apple": MPS_MESSAGE.format(held=9, other=2, allowed=22, asked=12),
    "GB10, Jetson": CUDA_MESSAGE.format("CUDA"),
    "AMD": CUDA_MESSAGE.format("HIP"),
    "Intel": CUDA_MESSAGE.format("XPU"),
}


class TooLarge(LitTiny):
    """More than two samples are too many."""

    def __init__(self, message):
        super().__init__(TinyCNN())
        self.message = message

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 2:
            raise RuntimeError(self.message)
        return super().training_step(batch, batch_idx)


@proves("MicroBatching", *MESSAGES)
@pytest.mark.parametrize("name", MESSAGES)
def test_a_batch_that_a_device_refuses_is_split(same_as_baseline, monkeypatch, name):
    played = PLAY[name](monkeypatch)
    played.reserved = 5 * GIB
    same_as_baseline(
        lambda: TooLarge(MESSAGES[name]),
        MicroBatching("auto"),
        baseline={"callbacks": [MicroBatching(2)]},
        **played.trainer_arguments(),
    )
    assert played.releases >= 1


GENERAL = ("GB10, Jetson", "GH200", "AMD", "Intel")


@proves("VRAMMonitor", *GENERAL)
@proves("EmptyCache", *GENERAL)
@proves("MemoryBudget", *GENERAL)
@pytest.mark.parametrize("name", GENERAL)
def test_a_device_with_the_names_of_cuda_is_read_emptied_and_limited(fit, monkeypatch, name):
    played, monitor = PLAY[name](monkeypatch), VRAMMonitor(path=None)
    played.live = played.peak = played.reserved = 7 * GIB
    fit(tiny, monitor, EmptyCache(every_n_batches=1), MemoryBudget("8GiB"), **played.trainer_arguments())
    found = monitor.peaks["train"]
    assert (found.device, found.source) == (str(played.device), "allocator")
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (7 * GIB, 7 * GIB)
    assert played.releases >= 3
    assert played.limits == [8 * GIB / played.total, 1.0]


@proves("OOM report", "Apple")
def test_the_page_of_an_apple_gpu(fit, monkeypatch, tmp_path):
    mps = apple(monkeypatch)
    mps.live, mps.reserved = 7 * GIB, 11 * GIB
    with pytest.raises(RuntimeError, match="MPS backend"):
        fit(lambda: TooLarge(MESSAGES["Apple"]), VRAMMonitor(), **mps.trainer_arguments())
    page = (tmp_path / "out_of_memory.md").read_text()
    for row in (
        "asked for | 12.00 GiB",
        "mps:0 has | 22.00 GiB",
        "limit of this process | 22.00 GiB",
        "free | 11.00 GiB",
        "in tensors of this process | 7.00 GiB",
        "reserved by it, not allocated | 2.00 GiB",
        "used by the driver for it | 2.00 GiB",
    ):
        assert row in page
    assert not re.search("fsdp_offload|ActivationOffload|PYTORCH_CUDA|torch.cuda", page)


@proves("OOM report", "GB10, Jetson", "AMD", "Intel")
@pytest.mark.parametrize(
    ("name", "helps", "absent"),
    [
        ("GB10, Jetson", "AutoVRAM", "fsdp_offload|ActivationOffload"),
        ("AMD", "AutoVRAM", "expandable_segments|nvidia-smi"),
        ("Intel", "AutoVRAM", "expandable_segments|nvidia-smi"),
    ],
)
def test_the_page_of_a_device_with_the_names_of_cuda(fit, monkeypatch, tmp_path, name, helps, absent):
    played = PLAY[name](monkeypatch)
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(lambda: TooLarge(MESSAGES[name]), VRAMMonitor(), **played.trainer_arguments())
    page = (tmp_path / "out_of_memory.md").read_text()
    assert f"{played.device} has | 16.00 GiB" in page
    assert "in tensors of this process | 13.00 GiB" in page
    assert helps in page
    assert not re.search(absent, page.partition("## The error")[0])


class Blocks(pl.LightningModule):
    """Activations are most of it: 45 MiB."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.net = nn.Sequential(*(copy.deepcopy(block) for _ in range(8)))

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(4096, 64), batch_size=2048)


@proves("AutoVRAM", "Apple", "GB10, Jetson")
@pytest.mark.parametrize("play", [apple, gb10])
def test_what_does_not_fit_is_planned_without_the_host(same_as_baseline, monkeypatch, caplog, play):
    caplog.set_level("INFO", "lightning.pytorch")
    workspaces = 0 if play is apple else 32 if _allocates_for_each_product() else 64
    played, auto = play(monkeypatch), AutoVRAM((34 + workspaces) * MIB, cache=False)
    same_as_baseline(Blocks, auto, **played.trainer_arguments())
    assert auto.budget_bytes == (34 + workspaces) * MIB
    logged = " ".join(caplog.text.split())
    assert re.search(r"\* \d+ .*ActivationCheckpointing\(budget=", logged)
    assert "ffload" not in logged


@proves("AutoVRAM", "AMD", "Intel", "GH200")
@pytest.mark.parametrize("name", ["AMD", "Intel", "GH200"])
def test_a_run_that_fits_is_left_alone(fit, monkeypatch, name):
    played, auto = PLAY[name](monkeypatch), AutoVRAM(cache=False)
    played.free = 15 * GIB
    fit(LitGPT, auto, **played.trainer_arguments())
    assert auto.budget_bytes == pytest.approx(0.97 * 15 * GIB, rel=0.01)


def test_the_budget_of_a_gb10_counts_its_page_cache_as_free(fit, monkeypatch):
    spark = gb10(monkeypatch)
    spark.available, auto = 100 * GIB, AutoVRAM(cache=False)
    fit(LitGPT, auto, **spark.trainer_arguments())
    assert auto.budget_bytes == pytest.approx(0.97 * 100 * GIB, rel=0.01)


@proves("MemoryBudget", "Apple")
def test_a_limit_of_an_apple_gpu_is_kept_and_the_advice_offloads_nothing(fit, monkeypatch):
    mps = apple(monkeypatch)
    with pytest.raises(MisconfigurationException, match=r"What helps: .*ActivationCheckpointing\(\)\.$") as caught:
        fit(LitGPT, MemoryBudget(6 * MIB, on_excess="error"), **mps.trainer_arguments())
    assert "ffload" not in str(caught.value)
    assert mps.limits == [6 * MIB / mps.total, 1.7]


DECLINES = "{}: .* shares memory with the CPU, so offload frees nothing\\. {}"


SHARING = ("Apple", "GB10, Jetson")


@proves("ActivationOffload", *SHARING, outcome="declined")
@pytest.mark.parametrize("play", [apple, gb10])
@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (ActivationOffload(1), ("ActivationOffload has no effect", r"Use ActivationCheckpointing\(\), or Act")),
        (
            ActivationCheckpointing(budget="1MiB", remedies=("recompute", "offload")),
            ("ActivationCheckpointing only recomputes", "Leave out 'offload'\\."),
        ),
    ],
    ids=["offload", "budget"],
)
def test_activations_are_not_copied_to_the_same_memory(same_as_baseline, monkeypatch, callback, words, play):
    copies, played = [], play(monkeypatch)
    with copies_noted(lambda way, num_bytes: copies.append(num_bytes)), pytest.warns(match=DECLINES.format(*words)):
        same_as_baseline(lambda: LitTiny(TinyGPT()), callback, **played.trainer_arguments())
    assert copies == []


def test_disk_is_other_memory(fit, monkeypatch, tmp_path):
    copies, spark = [], gb10(monkeypatch)
    with copies_noted(lambda way, num_bytes: copies.append(num_bytes)):
        fit(lambda: LitTiny(TinyGPT()), ActivationOffload(1, disk_path=tmp_path), **spark.trainer_arguments())
    assert copies


@pytest.fixture
def shared_host(monkeypatch):
    """Let the CPU be a device that shares its memory with the host."""
    monkeypatch.setattr(hook_points, "shares_host_memory", lambda device: True)


@proves("FSDPOffloadStrategy", "GB10, Jetson", outcome="declined")
@pytest.mark.usefixtures("shared_host")
@pytest.mark.parametrize(
    ("arguments", "offload"), [({"pin_memory": False}, "none"), ({"host_state": "bf16"}, "params")], ids=str
)
def test_the_strategy_keeps_on_the_device_what_frees_nothing_on_the_host(fit, arguments, offload):
    strategy = ForkingOffload(**arguments)
    with ExitStack() as stack:
        if offload == "none":
            stack.enter_context(
                pytest.warns(match=DECLINES.format("FSDPOffloadStrategy runs with offload='none'", "nvme_path"))
            )
        fit(tiny, strategy=strategy, devices=1)
    assert strategy.arguments.offload == offload
    assert strategy.make_again().arguments.offload == offload


class Scored(LitTiny):
    def __init__(self):
        super().__init__(TinyCNN())
        self.score = BinaryAUROC()

    def training_step(self, batch, batch_idx):
        self.score.update(torch.rand(3), torch.tensor([0, 1, 0]))
        assert type(vars(self.score).get("update")).__name__ != "partial"
        return super().training_step(batch, batch_idx)


@proves("MetricOffload", *SHARING, outcome="declined")
@pytest.mark.usefixtures("shared_host")
def test_lists_of_metrics_stay(fit):
    offload = MetricOffload()
    with pytest.warns(match=DECLINES.format("MetricOffload has no effect", "Remove it")):
        fit(Scored, offload)


CARD = {"bandwidth_bytes_per_s": 1e12, "flops_per_s": {"fp32": 2e13}}


def plan(**properties):
    card = DeviceSpec("card", 8 * GIB, **CARD, **properties, context_bytes=0)
    return plan_memory(Blocks(), torch.ones(16384, 64), device=card, budget="220MiB")


@proves("ActivationOffload", "GH200")
def test_a_fast_link_is_used_where_it_is_faster_than_recomputation():
    slow, fast = plan(bus_bytes_per_s=5e9), plan(bus_bytes_per_s=450e9)
    assert "ActivationCheckpointing" in str(slow.best.scheme)
    assert str(fast.best.scheme).endswith("ActivationOffload")
    assert fast.step_time_ratio < 1.02 < slow.step_time_ratio


def test_a_device_without_memory_of_its_own_is_planned_without_offload():
    found = plan(bus_bytes_per_s=450e9, shares_host_memory=True).found
    assert not any("ffload" in str(one.scheme) for one in found.tried)


def test_an_estimate_declines_what_a_run_declines():
    orin = find_device("orin")
    assert orin.shares_host_memory
    assert orin.bus_bytes_per_s is None

    def peak(*callbacks):
        trainer = {"callbacks": list(callbacks)}
        rows = torch.ones(2048, 64)
        return estimate_memory(Blocks(), rows, device=orin, trainer=trainer, find_limits=False).peak_bytes

    assert peak(ActivationOffload()) == peak()


@pytest.mark.parametrize(
    ("hip", "shares", "absent"), [("7.2", False, "expandable|nvidia-smi"), (None, True, "fsdp_offload|MetricOffload")]
)
def test_hints_are_those_of_the_device(monkeypatch, hip, shares, absent):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    found = OutOfMemory("", OutOfMemorySource.DEVICE, "cuda:0", FailedRequest(), "train", Place(Work.OTHER))
    found.shares_host_memory = found.may_view_buckets = shares
    hints = [cause.helps(found) for cause in CAUSES]
    assert all(hints)
    listed = "\n".join(hint for some in hints for hint in some)
    assert ("strategy=DDPStrategy(gradient_as_bucket_view=True), callbacks=[EarlyRelease()]" in listed) is shares
    assert not re.search(absent, listed)


def test_the_table_says_what_is_proven():
    head, *rows = rows_of(section(ROOT / "lightning_vram/memory/device/README.md", "What is tested"))
    cells = {(row[0].strip("`"), device): cell for row in rows for device, cell in zip(head[1:], row[1:], strict=True)}
    assert {key: cell for key, cell in cells.items() if cell not in ("untested", "refused")} == proven
