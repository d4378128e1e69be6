"""VRAMMonitor: when it measures, what it logs, shows, writes and refuses, and that it cleans up."""

import csv
import gc
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.devices import ACCELERATOR
from support.helpers import LitManual, LitTiny, TinyCNN, TinyGPT
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader

from lightning_vram import VRAMMonitor
from lightning_vram.memory.device.accelerators import AllocatorBytes
from lightning_vram.memory.device.measurement import read_measurements
from lightning_vram.memory.tracking.timeline import Category, Phase

MODULE = "lightning_vram.callbacks.vram_monitor.callback"


def readings(path: Path, stage: str = "train") -> list[tuple[int, int]]:
    return [(m.epoch, m.batch_idx) for m in read_measurements(path) if m.stage == stage]


@pytest.mark.parametrize(
    ("every_n_batches", "log_every_n_steps", "expected"),
    [(None, 4, [0, 1, 3]), (None, 0, [0, 1]), (3, 50, [0, 1, 2, 5])],
)
def test_which_batches(make_trainer, tmp_path, every_n_batches, log_every_n_steps, expected):
    model = LitTiny(TinyCNN())
    model.train_dataloader = lambda: DataLoader(model.net.samples(12), batch_size=2)
    callbacks = [VRAMMonitor(every_n_batches, path=tmp_path / "sub" / "m.jsonl")]
    make_trainer(callbacks=callbacks, log_every_n_steps=log_every_n_steps).fit(model)
    assert readings(tmp_path / "sub" / "m.jsonl") == [(epoch, batch) for epoch in range(2) for batch in expected]
    assert readings(tmp_path / "sub" / "m.jsonl", "validate") == [(0, 0), (1, 0)]
    lines = (tmp_path / "sub" / "m.jsonl").read_text().splitlines()
    assert all(json.loads(line)["device"] == "cpu" for line in lines)


def test_numbers_of_a_step_and_of_all_stages(make_trainer):
    monitor, model = VRAMMonitor(path=None), LitTiny(TinyGPT())
    trainer = make_trainer(callbacks=[monitor])
    for run in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        run(model)
    assert set(monitor.peaks) == {"train", "validate", "test", "predict"}
    peak = monitor.peaks["train"]
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    counters = 4 * len(list(model.parameters()))
    assert peak.source == "tracker"
    assert peak.peak_by_category[Category.PARAMETERS] == parameter_bytes
    assert peak.peak_by_category[Category.OPTIMIZER_STATE] == 2 * parameter_bytes + counters
    assert sum(peak.peak_by_category.values()) == peak.peak_allocated_bytes == max(peak.peak_by_phase.values())
    assert set(peak.peak_by_phase) == set(Phase)
    assert peak.saved_for_backward_bytes > 0
    assert monitor.peaks["validate"].peak_by_phase == {Phase.FORWARD: monitor.peaks["validate"].peak_allocated_bytes}
    assert monitor.seconds_per_batch is not None


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_logs_to_every_logger(make_trainer, tmp_path):
    loggers = [CSVLogger(tmp_path, "one"), CSVLogger(tmp_path, "other")]
    make_trainer(callbacks=[VRAMMonitor(path=None)], logger=loggers, max_epochs=1).fit(LitTiny(TinyCNN()))
    for logger in loggers:
        rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
        train = [row for row in rows if row["vram/peak_allocated_bytes"]]
        assert [row["step"] for row in train] == ["1", "2"]
        assert all(train[0][f"vram/{name}"] for name in ("allocated_bytes", "backward/peak_allocated_bytes"))
        assert any(row["vram/validate/peak_allocated_bytes"] for row in rows)


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_shows_the_highest_peak_in_the_bar(bar, make_trainer):
    shown = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module).get("vram"))

    bar = bar()
    callbacks = [VRAMMonitor(path=None), Look(), bar]
    make_trainer(callbacks=callbacks, enable_progress_bar=True, max_epochs=1).fit(LitTiny(TinyCNN()))
    assert all(text.endswith(("KiB", "MiB")) for text in shown)
    assert "get_metrics" not in vars(bar)


def test_nothing_is_tracked_or_written_if_told_so(make_trainer, monkeypatch, tmp_path):
    make_trainer(callbacks=[VRAMMonitor()], fast_dev_run=True).fit(LitTiny(TinyCNN()))
    monkeypatch.setattr("lightning_vram.memory.tracking.tracker.track_memory", None)  # would fail
    monitor = VRAMMonitor(1, track=False, path=None)
    make_trainer(callbacks=[monitor]).fit(LitTiny(TinyCNN()))
    assert not list(tmp_path.rglob("*.jsonl"))
    assert monitor.peaks == {}
    assert monitor.seconds_per_batch is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_are_not_tracked(make_trainer):
    monitor, model = VRAMMonitor(path=None, track=True), LitTiny(TinyCNN())
    model.net[0].compile(backend="eager")
    with pytest.warns(UserWarning, match=r"^VRAMMonitor\(track=True\) has no effect on a compiled module"):
        make_trainer(callbacks=[monitor]).fit(model)
    assert monitor.peaks == {}


@pytest.mark.parametrize(
    "error", [RuntimeError("planted"), KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory.")]
)
def test_a_run_that_fails_leaves_nothing_on(error, make_trainer):
    class FailingStep(LitTiny):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise error
            return super().training_step(batch, batch_idx)

    with pytest.raises((type(error), SystemExit)) as caught:
        make_trainer(callbacks=[VRAMMonitor(path=None)]).fit(FailingStep(TinyCNN()))
    assert _get_current_dispatch_mode() is None
    assert gc.isenabled()
    notes = getattr(caught.value, "__notes__", [])
    if isinstance(error, torch.OutOfMemoryError):
        assert len(notes) == 2
        assert notes[0].startswith("VRAMMonitor, in the batch that ran out of memory: train epoch 0 batch 1: peak ")
        before = "VRAMMonitor, last measurement before the out-of-memory error: train epoch 0 batch 0: peak "
        assert notes[1].startswith(before)
    else:
        assert notes == []


def test_a_skipped_batch_ends_the_measurement(make_trainer):
    class Skip(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            return -1

        def on_validation_start(self, trainer, pl_module):
            assert _get_current_dispatch_mode() is None

    make_trainer(callbacks=[VRAMMonitor(path=None), Skip()], limit_val_batches=1).fit(LitTiny(TinyCNN()))
    assert _get_current_dispatch_mode() is None


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_ranks_with_different_numbers_of_batches_do_not_wait_for_one_another(make_trainer, tmp_path):
    model = LitTiny(TinyCNN())
    model.predict_dataloader = lambda: DataLoader(model.net.samples(3), batch_size=1)
    trainer = make_trainer(callbacks=[VRAMMonitor()], strategy="ddp_fork", devices=2)
    trainer.predict(model, return_predictions=False)
    assert readings(tmp_path / "vram.jsonl", "predict") == [(0, 0)]


class FakeGPU:
    """An allocator with a script: what is allocated, and how high it went."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated, self.peak, self.num_reserved = 100, 100, 0
        monkeypatch.setattr(f"{MODULE}.has_cache", lambda device: True)
        monkeypatch.setattr(f"{MODULE}.counts_peaks", lambda device: True)
        monkeypatch.setattr("lightning_vram.memory.device.accelerators.read_allocator", self._read)
        monkeypatch.setattr("lightning_vram.memory.device.accelerators._allocator", lambda device: self)

    def spike(self, num_bytes: int) -> None:
        self.peak = max(self.peak, self.allocated + num_bytes)

    def _read(self, device: torch.device) -> AllocatorBytes:
        return AllocatorBytes(self.allocated, self.allocated, self.peak, max(self.peak, self.num_reserved))

    def reset_peaks(self, device: torch.device) -> None:
        self.peak = self.allocated


class Spikes(LitTiny):
    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(TinyCNN())
        self.gpu = gpu

    def training_step(self, batch, batch_idx):
        self.gpu.spike(10 if batch_idx < 2 else 1000)  # the last batch is not measured
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        self.gpu.spike(20)

    def test_step(self, batch, batch_idx):
        self.gpu.spike(5000 if batch_idx == 2 else 3)

    def test_dataloader(self):
        return DataLoader(self.net.samples(3), batch_size=1)


def test_no_peak_of_an_allocator_is_lost(make_trainer, monkeypatch, tmp_path):
    gpu = FakeGPU(monkeypatch)
    monitor = VRAMMonitor(100)
    trainer = make_trainer(callbacks=[monitor], max_epochs=1)
    model = Spikes(gpu)
    trainer.fit(model)
    train = [m for m in read_measurements(tmp_path / "vram.jsonl") if m.stage == "train"]
    assert [m.peak_allocated_bytes for m in train] == [120, 120, 1100]
    assert train[0].peak_by_phase == {Phase.FORWARD: 120, Phase.BACKWARD: 100, Phase.OPTIMIZER_STEP: 100}
    assert (train[-1].epoch, train[-1].source, train[-1].peak_reserved_bytes) == (0, "allocator", 1100)
    trainer.test(model)
    assert monitor.peaks["test"].peak_allocated_bytes == 5100


def test_much_that_is_reserved_and_not_used_is_said_at_the_end(make_trainer, monkeypatch):
    gpu = FakeGPU(monkeypatch)
    gpu.num_reserved = 1 << 30
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monitor = VRAMMonitor(path=None)
    with pytest.warns(UserWarning, match="expandable_segments"):
        make_trainer(callbacks=[monitor], max_epochs=1, limit_val_batches=0).fit(LitManual(TinyCNN()))
    assert set(monitor.peaks["train"].peak_by_phase) == set(Phase)  # with manual optimization as well


def test_several_are_refused(make_trainer):
    trainer = make_trainer(callbacks=[VRAMMonitor(), VRAMMonitor(2)])
    with pytest.raises(MisconfigurationException, match=r"^VRAMMonitor can be used once, got several"):
        trainer.fit(LitTiny(TinyCNN()))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every_n_batches": 0}, ValueError, r"^VRAMMonitor\(every_n_batches\) must be at least 1, got 0\.$"),
        ({"track": "yes"}, TypeError, r"^VRAMMonitor\(track\) must be True, False or None, got 'yes' of type str\.$"),
        ({"path": 3}, TypeError, r"^VRAMMonitor\(path\) must be text, a Path or None, got 3 of type int\.$"),
        ({"path": ""}, ValueError, r"^VRAMMonitor\(path\) must name a file, got ''\. path=None writes no file\.$"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        VRAMMonitor(**arguments)


@pytest.mark.device
def test_allocator_and_tracker_agree_on_a_gpu(make_trainer):
    monitor, model = VRAMMonitor(1, track=True, path=None), LitTiny(TinyGPT(width=64))
    make_trainer(callbacks=[monitor], accelerator=ACCELERATOR, devices=1).fit(model)
    peak = monitor.peaks["train"]
    assert peak.source == "allocator"
    tracked = sum(peak.peak_by_category.values())
    assert tracked <= peak.peak_allocated_bytes <= peak.peak_reserved_bytes
