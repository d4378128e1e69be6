"""Memory that runs out in validate, test and predict, and where their results are put together."""

import re
import types
from itertools import count

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_vram import MetricOffload, VRAMMonitor
from lightning_vram.callbacks.vram_monitor import out_of_memory
from lightning_vram.callbacks.vram_monitor import out_of_memory as last_batches
from lightning_vram.callbacks.vram_monitor.out_of_memory import _ranked
from lightning_vram.memory.units import GIB, MIB
from lightning_vram.planner.scheme import Part, Scheme
from lightning_vram.private_names.dispatcher import FakeTensor

STAGES = ("validate", "test", "predict")
MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 80.00 MiB of which 1.00 MiB is "
    "free. Including non-PyTorch memory, this process has 79.00 MiB memory in use. Of the allocated memory 70.00 MiB "
    "is allocated by PyTorch, and 4.00 MiB is reserved by PyTorch but unallocated."
)
LITTLE = MESSAGE.replace("20.00 MiB", "1.00 MiB").replace("4.00 MiB", "0.50 MiB")
COLLECTED = "outputs or metric lists, collected over the batches"
PUT_TOGETHER = "the outputs of all batches, concatenated at the end of the epoch"
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
    monkeypatch.setattr(last_batches, "_allocated_bytes", lambda device: next(readings))


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
    assert page.startswith(f"# Out of memory: {PUT_TOGETHER}\n")
    assert "| where | the end of the epoch |" in page
    assert page.index("MetricOffload") < page.index("BasePredictionWriter")


@pytest.mark.usefixtures("growing")
@pytest.mark.parametrize("stage", STAGES)
def test_what_grows_with_the_batches(stage, explain):
    batches = dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), 20)
    page = explain(stage, Lit(at_batch=15), **batches)
    assert page.startswith(f"# Out of memory: {COLLECTED}\n")
    assert "Each of the last batches left 1.00 MiB more than the one before." in page


@pytest.mark.usefixtures("growing")
def test_growth_of_the_training_is_none_of_the_validation(explain):
    page = explain("fit", Lit(at_batch=0), max_epochs=1, limit_train_batches=20, limit_val_batches=1)
    assert page.startswith(f"# Out of memory: {TOO_LARGE}\n")


def test_growth_of_the_training_goes_on_after_a_validation():
    batches = last_batches.LastBatches()
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


class LitWide(pl.LightningModule):
    """Runs out of memory in a real batch, and not in those that are run to explain it."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(2)))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.net(batch).square().mean())
        if not isinstance(batch, FakeTensor):
            raise torch.OutOfMemoryError(LITTLE)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        hidden = self.net(batch)
        if not isinstance(batch, FakeTensor):
            raise torch.OutOfMemoryError(LITTLE)
        return hidden

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(2048, 256), batch_size=2048)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


WEIGHTS, MAP = 2 * 256 * 256 * 4, 2048 * 256 * 4  # bytes: 0.5 MiB, 2 MiB
PEAK = WEIGHTS + 3 * MAP  # the batch, and two maps


@pytest.mark.parametrize("stage", STAGES)
def test_what_helps_an_evaluation_is_told_with_what_it_saves(stage, explain):
    page = explain(stage, LitWide())
    assert page.startswith(f"# Out of memory: {TOO_LARGE}\n")
    rows = re.findall(r"\| (.*) \| ([\d.]+) MiB \| ([\d.]+)% \| (.*) \| (.*) \| `?(.*?)`? \|", page)
    # in 16 bits the batch as the loader has made it is there as well
    half, bits = (PEAK - WEIGHTS) // 2 / MIB, (PEAK // 2 - MAP) / MIB
    assert rows == [  # of 70 MiB in tensors, and one more that was asked for
        ("1", "71.00", "101.4", "1.00x", "exact", "baseline"),
        ("2", f"{71 - bits:.2f}", f"{(71 - bits) / 0.7:.1f}", "?", "approximate", 'precision="bf16-true"'),
        ("* 3", f"{71 - half:.2f}", f"{(71 - half) / 0.7:.1f}", "?", "lossless", "DataLoader(..., batch_size=1024)"),
    ]


def test_a_validation_within_a_fit_keeps_the_format_of_the_training(explain):
    page = explain("fit", LitWide(), max_epochs=1)
    assert "| when | validate, epoch 0, batch 0 |" in page
    assert "| * 2 | 68.00 MiB | 97.1% | ? | lossless | `DataLoader(..., batch_size=1024)` |" in page
    assert "bf16-true" not in page


def test_what_lies_on_the_host_is_not_moved_back_to_a_full_device(monkeypatch):
    def move_back(*_):
        raise torch.OutOfMemoryError(MESSAGE)

    callback = MetricOffload()
    monkeypatch.setattr(callback, "teardown", move_back)
    out_of_memory._undo_features(types.SimpleNamespace(callbacks=[callback], lightning_module=None))


def test_remedies_that_are_alike_are_told_once():
    def measured(budget, needed_bytes, seconds=1.0):
        parts = (Part("lightning_vram.ActivationCheckpointing", {"budget": budget}),) if budget else ()
        return types.SimpleNamespace(scheme=Scheme(parts), needed_bytes=needed_bytes, seconds=seconds)

    plain = measured(None, 3 * GIB)
    tried = [plain, measured("5494KiB", GIB, 1.5), measured("5493KiB", GIB, 1.25), measured("1MiB", GIB // 2, 2.0)]
    remedies = _ranked(tried, 2 * GIB)
    assert [remedy.code for remedy in remedies] == [
        "callbacks=[ActivationCheckpointing(budget='5493KiB')]",
        "callbacks=[ActivationCheckpointing(budget='1MiB')]",
    ]


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_after_30_seconds_no_other_evaluation_is_tried(stage, explain, monkeypatch):
    monkeypatch.setattr(out_of_memory, "monotonic", count(0, 20).__next__)  # the batch as it is takes 20 s
    page = explain(stage, LitWide())
    assert "Stopped at the limit of 30 s: 2 configurations were not tried." in page
    assert "batch_size=1024" not in page


@pytest.mark.parametrize("num_rows", [2048, 1024], ids=["the baseline", "the half"])
def test_ctrl_c_ends_the_advice_for_an_evaluation(num_rows, explain):
    class Interrupted(LitWide):
        def validation_step(self, batch, batch_idx):
            if isinstance(batch, FakeTensor) and len(batch) == num_rows:
                raise KeyboardInterrupt
            super().validation_step(batch, batch_idx)

    page = explain("validate", Interrupted())
    assert ("not estimated: stopped by Ctrl-C. Half the `batch_size`" in page) == (num_rows == 2048)
    assert ("Stopped by Ctrl-C after 0 s: other configurations were not tried." in page) == (num_rows == 1024)
