"""Features on devices that are not here: what an Apple GPU, a GB10, a ROCm build or a fast link changes."""

import copy
import re
from contextlib import ExitStack

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import ForkingOffload, LitTiny, TinyCNN, TinyGPT
from support.planned_models import LitGPT
from support.played_devices import MPS_MESSAGE, PlayedDevice, apple, gb10
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
from lightning_vram.memory.estimate.device_spec import DeviceSpec, find_device
from lightning_vram.memory.units import GIB, MIB

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")


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


class TooLarge(LitTiny):
    """More than two samples are too many, in words of Metal."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 2:
            raise RuntimeError(MPS_MESSAGE.format(held=9, other=2, allowed=22, asked=12))
        return super().training_step(batch, batch_idx)


def test_a_batch_that_metal_refuses_is_split(fit, same_as_baseline, monkeypatch):
    mps = apple(monkeypatch)
    mps.reserved = 5 * GIB
    same_as_baseline(
        lambda: TooLarge(TinyCNN()),
        MicroBatching("auto"),
        baseline={"callbacks": [MicroBatching(2)]},
        **mps.trainer_arguments(),
    )
    assert mps.releases >= 1


def test_the_page_of_an_apple_gpu(fit, monkeypatch, tmp_path):
    mps = apple(monkeypatch)
    mps.live, mps.reserved = 7 * GIB, 11 * GIB
    with pytest.raises(RuntimeError, match="MPS backend"):
        fit(lambda: TooLarge(TinyCNN()), VRAMMonitor(), **mps.trainer_arguments())
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


@pytest.mark.parametrize(("play", "budget_mib"), [(apple, 30), (gb10, 98)])  # workspaces are 64 MiB of it
def test_what_does_not_fit_is_planned_without_the_host(same_as_baseline, monkeypatch, caplog, play, budget_mib):
    caplog.set_level("INFO", "lightning.pytorch")
    played, auto = play(monkeypatch), AutoVRAM(budget_mib * MIB, cache=False)
    same_as_baseline(Blocks, auto, **played.trainer_arguments())
    assert auto.budget_bytes == budget_mib * MIB
    logged = " ".join(caplog.text.split())
    assert re.search(r"\* \d+ .*ActivationCheckpointing\(budget=", logged)
    assert "ffload" not in logged


def test_the_budget_of_a_gb10_counts_its_page_cache_as_free(fit, monkeypatch):
    spark = gb10(monkeypatch)
    spark.available, auto = 100 * GIB, AutoVRAM(cache=False)
    fit(LitGPT, auto, **spark.trainer_arguments())
    assert auto.budget_bytes == pytest.approx(0.97 * 100 * GIB, rel=0.01)


def test_a_limit_of_an_apple_gpu_is_kept_and_the_advice_offloads_nothing(fit, monkeypatch):
    mps = apple(monkeypatch)
    with pytest.raises(MisconfigurationException, match=r"What helps: .*ActivationCheckpointing\(\)\.$") as caught:
        fit(LitGPT, MemoryBudget(6 * MIB, on_excess="error"), **mps.trainer_arguments())
    assert "ffload" not in str(caught.value)
    assert mps.limits == [6 * MIB / mps.total, 1.7]


DECLINES = "{} offloads nothing: .* shares the memory of the host, so offloading frees none\\."


@pytest.mark.parametrize(
    ("callback", "name"),
    [
        (ActivationOffload(1), "ActivationOffload"),
        (
            ActivationCheckpointing(budget="1MiB", remedies=("recompute", "offload")),
            r"ActivationCheckpointing\(remedies=\('recompute', 'offload'\)\)",
        ),
    ],
    ids=["offload", "budget"],
)
def test_activations_are_not_copied_to_the_same_memory(same_as_baseline, monkeypatch, callback, name):
    copies, spark = [], gb10(monkeypatch)
    with copies_noted(lambda way, num_bytes: copies.append(num_bytes)), pytest.warns(match=DECLINES.format(name)):
        same_as_baseline(lambda: LitTiny(TinyGPT()), callback, **spark.trainer_arguments())
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


@pytest.mark.usefixtures("shared_host")
@pytest.mark.parametrize(
    ("arguments", "offload"), [({"pin_memory": False}, "none"), ({"host_state": "bf16"}, "params")], ids=str
)
def test_the_strategy_keeps_on_the_device_what_frees_nothing_on_the_host(fit, arguments, offload):
    strategy = ForkingOffload(**arguments)
    with ExitStack() as stack:
        if offload == "none":
            stack.enter_context(pytest.warns(match=DECLINES.format("FSDPOffloadStrategy")))
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


@pytest.mark.usefixtures("shared_host")
def test_lists_of_metrics_stay(fit):
    offload = MetricOffload()
    with pytest.warns(match=DECLINES.format("MetricOffload")):
        fit(Scored, offload)


CARD = {"bandwidth_bytes_per_s": 1e12, "flops_per_s": {"fp32": 2e13}}


def plan(**properties):
    card = DeviceSpec("card", 8 * GIB, **CARD, **properties, context_bytes=0)
    return plan_memory(Blocks(), torch.ones(16384, 64), device=card, budget="220MiB")


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
