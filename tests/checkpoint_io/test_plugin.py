"""StreamedCheckpointIO: ordinary files, whole or not at all, and no copy of the states in host memory."""

import ctypes
import gc
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.plugins.io import TorchCheckpointIO
from support.helpers import LitTiny, TinyCNN
from torch import nn
from torch.utils.data import DataLoader

from lightning_vram.checkpoint_io import StreamedCheckpointIO
from lightning_vram.core.ranks import CheckpointError
from lightning_vram.memory.units import MIB

PLUGINS = [TorchCheckpointIO, StreamedCheckpointIO]
CHECKPOINT = {"state_dict": {"weight": torch.arange(3.0)}, "note": "first"}


def read(path):
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("reader", PLUGINS)
@pytest.mark.parametrize("writer", PLUGINS)
def test_a_run_goes_on_to_the_bit_whoever_wrote_and_reads(fit, same_as_baseline, tmp_path, writer, reader):
    path = tmp_path / "folder" / "x.ckpt"
    fit(lambda: LitTiny(TinyCNN()), plugins=[writer()]).trainer.save_checkpoint(path)
    content = path.read_bytes()
    same_as_baseline(lambda: LitTiny(TinyCNN()), plugins=[reader()], max_epochs=2, ckpt_path=path)
    assert path.read_bytes() == content  # training writes into its own pages
    assert os.listdir(path.parent) == ["x.ckpt"]


def test_a_save_that_fails_leaves_the_file_before(tmp_path):
    plugin, path = StreamedCheckpointIO(), tmp_path / "x.ckpt"
    plugin.save_checkpoint(CHECKPOINT, path)
    with pytest.raises(AttributeError, match="lambda"):
        plugin.save_checkpoint({**CHECKPOINT, "note": "second", "bad": lambda: None}, path)
    assert read(path)["note"] == "first"
    assert os.listdir(tmp_path) == ["x.ckpt"]


class DiesHere:
    def __reduce__(self):
        os._exit(9)


def test_a_process_that_dies_while_it_saves_leaves_the_file_before(tmp_path):
    plugin, path = StreamedCheckpointIO(), tmp_path / "x.ckpt"
    plugin.save_checkpoint(CHECKPOINT, path)
    child = os.fork()
    if child == 0:
        plugin.save_checkpoint({"note": "second", "bad": DiesHere()}, path)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(os.listdir(tmp_path)) == 2  # what it had begun
    assert read(path)["note"] == "first"
    plugin.save_checkpoint({"note": "third"}, path)
    assert read(path)["note"] == "third"
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (events.append(name), real(*args))[1])
    StreamedCheckpointIO().save_checkpoint(CHECKPOINT, tmp_path / "x.ckpt")
    assert events == ["fsync", "replace", "fsync"]  # the file, and then its folder


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    plugin, path = StreamedCheckpointIO(), tmp_path / "x.ckpt"
    plugin.save_checkpoint(CHECKPOINT, path)
    full = open("/dev/full", "wb")  # noqa: SIM115 - closed by who writes into it
    monkeypatch.setattr(Path, "open", lambda *_: full)
    with pytest.raises(OSError, match="No space left on device"):
        plugin.save_checkpoint({"weight": torch.zeros(MIB)}, path)
    monkeypatch.undo()
    assert read(path)["note"] == "first"


def test_other_file_systems_are_left_to_lightning():
    plugin = StreamedCheckpointIO()
    plugin.save_checkpoint(CHECKPOINT, "memory://here/x.ckpt")
    assert plugin.load_checkpoint("memory://here/x.ckpt", weights_only=True)["note"] == "first"
    plugin.remove_checkpoint("memory://here/x.ckpt")
    assert not MemoryFileSystem().exists("memory://here/x.ckpt")


def test_what_it_does_not_take_is_named(tmp_path):
    plugin, path = StreamedCheckpointIO(), tmp_path / "x.ckpt"
    with pytest.raises(TypeError, match="`storage_options` arg is not supported for `StreamedCheckpointIO`"):
        plugin.save_checkpoint(CHECKPOINT, path, storage_options={})
    with pytest.raises(FileNotFoundError, match=r"^Checkpoint file not found: .*x\.ckpt$"):
        plugin.load_checkpoint(path)
    path.write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match=r"^x\.ckpt is damaged or not a checkpoint"):
        plugin.load_checkpoint(path)
    path.unlink()
    path.mkdir()
    expected = rf"^{re.escape(str(path))} is a folder; a checkpoint is a file\. Choose another name\.$"
    with pytest.raises(IsADirectoryError, match=expected):
        plugin.save_checkpoint(CHECKPOINT, path)


def test_a_place_for_the_tensors_is_left_to_lightning(tmp_path):
    plugin = StreamedCheckpointIO()
    plugin.save_checkpoint(CHECKPOINT, tmp_path / "x.ckpt")
    loaded = plugin.load_checkpoint(tmp_path / "x.ckpt", map_location="meta")
    assert loaded["state_dict"]["weight"].device.type == "meta"


class Large(pl.LightningModule):
    """16 MiB of weights, 48 with the optimizer's states."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.net = nn.Linear(width, width, bias=False)
        self.grown = 0

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def train_dataloader(self):
        return DataLoader(torch.ones(2, self.net.in_features), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def setup(self, stage):
        give_back_freed()
        self.before = resident_bytes("RssAnon")

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["optimizer_states"]
        self.grown = resident_bytes("RssAnon") - self.before


STATE_BYTES = 48 * MIB


def resident_bytes(kind):
    """Of Linux: VmHWM is the peak since it was reset, RssAnon is what is no file's."""
    return int(re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def give_back_freed():
    """To the system, or a copy would find room in what runs and tests before have freed, and nothing would grow."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # of glibc


def save_and_resume(plugin, width, folder):
    """What saving and resuming take of host memory."""
    arguments = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = pl.Trainer(**arguments, enable_model_summary=False, plugins=[plugin()], max_steps=1)
    trainer.fit(Large(width))
    trainer.optimizers[0].zero_grad()
    give_back_freed()
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    trainer.save_checkpoint(f"{folder}/{width}.ckpt")
    saving = resident_bytes("VmHWM") - before
    resumed = Large(width)
    trainer = pl.Trainer(**arguments, enable_model_summary=False, plugins=[plugin()], max_steps=2)
    trainer.fit(resumed, ckpt_path=f"{folder}/{width}.ckpt", weights_only=True)
    return saving, resumed.grown


def measure(folder):
    """In a process of its own, which starts at no peak."""
    for plugin in PLUGINS:
        save_and_resume(plugin, 2, folder)  # brings the code that runs into memory
    return [save_and_resume(plugin, 2048, folder) for plugin in PLUGINS]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc/self/clear_refs")
def test_host_memory_holds_no_second_copy(tmp_path):
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        (saving, resuming), streamed = pool.submit(measure, tmp_path).result()
    assert saving > 0.9 * STATE_BYTES  # else this shows nothing
    assert resuming > 0.6 * STATE_BYTES  # torch 2.11 reads a part from the file
    assert max(streamed) < 0.1 * STATE_BYTES
