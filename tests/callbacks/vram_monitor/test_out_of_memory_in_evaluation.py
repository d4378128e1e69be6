"""Memory that runs out in validate, test and predict, and where their results are put together."""

import types

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_vram import MetricOffload, VRAMMonitor
from lightning_vram.callbacks.vram_monitor import out_of_memory
from lightning_vram.memory.units import MIB

STAGES = ("validate", "test", "predict")
MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 80.00 MiB of which 1.00 MiB is "
    "free. Including non-PyTorch memory, this process has 79.00 MiB memory in use. Of the allocated memory 70.00 MiB "
    "is allocated by PyTorch, and 4.00 MiB is reserved by PyTorch but unallocated."
)
COLLECTED = "outputs or metric lists, collected over the batches"
TOO_LARGE = "a validation, test or prediction batch is too large"


class Lit(pl.LightningModule):
    """Runs out of memory in the batch, or at the end."""

    def __init__(self, at_batch=None, wraps=False):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)
        self.at_batch, self.wraps = at_batch, wraps

    def fail(self):
        raise torch.OutOfMemoryError(MESSAGE)

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def validation_step(self, batch, batch_idx):
        if batch_idx == self.at_batch:
            try:
                self.fail()
            except RuntimeError as oom:
                if self.wraps:
                    raise ValueError("my wrapper") from oom
                raise
        return self.net(batch).sum()

    test_step = predict_step = validation_step

    def on_validation_epoch_end(self):
        if self.at_batch is None:
            self.fail()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(80, 4), batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.fixture
def explain(make_trainer, tmp_path):
    def explain(stage, module, **arguments):
        trainer = make_trainer(callbacks=[VRAMMonitor()], default_root_dir=tmp_path, **arguments)
        with pytest.raises((RuntimeError, ValueError)):
            getattr(trainer, stage)(module)
        return (tmp_path / "out_of_memory.md").read_text()

    return explain


@pytest.fixture
def growing(monkeypatch):
    """A device on which each batch leaves a MiB more."""
    readings = iter(range(40 * MIB, 400 * MIB, MIB))
    monkeypatch.setattr(out_of_memory, "has_cache", lambda device: True)

    def read(device):
        return types.SimpleNamespace(allocated_bytes=next(readings))

    monkeypatch.setattr(out_of_memory, "read_allocator", read)


@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_is_told_with_its_size(stage, explain, tmp_path):
    page = explain(stage, Lit(at_batch=0), limit_val_batches=1)
    assert page.startswith(f"# Out of memory: {TOO_LARGE}\n")
    assert f"| when | {stage}, epoch 0, batch 0 |" in page
    assert "Half the `batch_size` of this data loader would need up to 35.00 MiB less." in page
    assert not list(tmp_path.rglob("*.png"))  # there is no step of a training to draw
    assert "| uncategorized | 70.00 MiB | 100% |" in page  # no forward of a training: no activations


@pytest.mark.parametrize("stage", STAGES)
def test_the_end_of_the_epoch(stage, explain):
    page = explain(stage, Lit(), limit_val_batches=1)
    assert page.startswith(f"# Out of memory: {COLLECTED}\n")
    assert "| where | the end of the epoch |" in page
    assert page.index("MetricOffload") < page.index("BasePredictionWriter")


@pytest.mark.usefixtures("growing")
def test_what_grows_with_the_batches(explain):
    page = explain("predict", Lit(at_batch=15), limit_predict_batches=20)
    assert page.startswith(f"# Out of memory: {COLLECTED}\n")
    assert "Each of the last batches left 1.00 MiB more than the one before." in page


@pytest.mark.usefixtures("growing")
def test_growth_of_the_training_is_none_of_the_validation(explain):
    page = explain("fit", Lit(at_batch=0), max_epochs=1, limit_train_batches=20, limit_val_batches=1)
    assert page.startswith(f"# Out of memory: {TOO_LARGE}\n")


def test_growth_of_the_training_goes_on_after_a_validation():
    batches = out_of_memory.LastBatches()
    batches.ends.append((1, 1))
    batches.switch_stage("validate")
    batches.ends.append((1, 2))
    batches.switch_stage("train")
    assert list(batches.ends) == [(1, 1)]
    batches.switch_stage("validate")
    assert not batches.ends


def test_a_wrapper_hides_no_facts(explain):
    page = explain("predict", Lit(at_batch=0, wraps=True), limit_predict_batches=1)
    assert "| asked for | 20.00 MiB |" in page
    assert "| cpu has | 80.00 MiB |" in page
    assert "| where | the forward |" in page
    assert "self.fail()" not in page  # but the line in it
    assert "raise torch.OutOfMemoryError(MESSAGE)" in page
    assert page.startswith(f"# Out of memory: {TOO_LARGE}\n")


def test_what_lies_on_the_host_is_not_moved_back_to_a_full_device(monkeypatch):
    def move_back(*_):
        raise torch.OutOfMemoryError(MESSAGE)

    callback = MetricOffload()
    monkeypatch.setattr(callback, "teardown", move_back)
    out_of_memory._undo_features(types.SimpleNamespace(callbacks=[callback], lightning_module=None))
