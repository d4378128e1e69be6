"""Memory that runs out is explained: causes are told apart, and remedies save what is said."""

import re
import signal
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_vram
from lightning_vram import InPlaceFusion, VRAMMonitor
from lightning_vram.callbacks.vram_monitor import out_of_memory
from lightning_vram.demos import ByteGPT
from lightning_vram.memory.units import MIB, format_bytes
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.report.estimate import limit_line, picture


def cuda_message(asked=20, total=80, free=1, process=79, allocated=70, cached=4):
    """As CUDA's allocator words it; all in MiB."""
    return (
        f"CUDA out of memory. Tried to allocate {asked}.00 MiB. GPU 0 has a total capacity of {total}.00 MiB of which "
        f"{free}.00 MiB is free. Including non-PyTorch memory, this process has {process}.00 MiB memory in use. Of the "
        f"allocated memory {allocated}.00 MiB is allocated by PyTorch, and {cached}.00 MiB is reserved by PyTorch but "
        "unallocated."
    )


def run_out(value, **sizes):
    """Raise in a real step, and not in those that are run to explain it."""
    if not isinstance(value, FakeTensor):
        raise torch.OutOfMemoryError(cuda_message(**sizes))
    return value


class Layer(nn.Linear):
    fails = False

    def forward(self, value):
        value = torch.relu(super().forward(value))
        return run_out(value) if self.fails else value


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return run_out(grad)


class Lit(pl.LightningModule):
    """Runs out of memory where it is told."""

    def __init__(self, where, **sizes):
        super().__init__()
        self.where, self.sizes = where, sizes
        self.layers = nn.Sequential(*(Layer(16, 16) for _ in range(2)))
        self.head = nn.Linear(16, 4096 if where == "logits" else 4)

    def training_step(self, batch, batch_idx):
        self.layers[1].fails = self.where == "layer"
        value = self.layers(batch)
        if self.where == "step":
            run_out(value, **self.sizes)
        if self.where == "backward":
            value = Fails.apply(value)
        logits = self.head(value.repeat(64, 1))
        if self.where == "logits":
            run_out(logits, **self.sizes)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        if self.where == "optimizer":
            optimizer.register_step_post_hook(lambda *_: run_out(self.head.weight))
        return optimizer

    def on_save_checkpoint(self, checkpoint):
        if self.where == "saving":
            run_out(self.head.weight)

    def train_dataloader(self):
        return DataLoader(torch.ones(12, 16), batch_size=4)


def explain(make_trainer, folder, module, *callbacks, **arguments) -> tuple[str, str]:
    """Return the note, and the page."""
    monitor = VRAMMonitor()
    trainer = make_trainer(callbacks=[monitor, *callbacks], default_root_dir=folder, max_epochs=1, **arguments)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(module)
    return caught.value.__notes__[-1], (folder / "out_of_memory.md").read_text()


@pytest.fixture
def unmeasured(monkeypatch):
    """Remedies take seconds."""
    monkeypatch.setattr(out_of_memory, "_why_not", lambda *_: "this is a test.")


CAUSES = {
    "another process": ("another process is on the device", Lit("step", total=2000, free=1, process=79)),
    "fragmentation": ("fragmentation: enough memory was free, but not in one block", Lit("step", cached=40, asked=20)),
    "states": ("the optimizer state does not fit", Lit("optimizer")),
    "batch, backward": ("the batch is too large: saved activations", Lit("backward")),
}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(("title", "module"), CAUSES.values(), ids=CAUSES)
def test_causes_are_told_apart(title, module, make_trainer, tmp_path):
    note, page = explain(make_trainer, tmp_path, module)
    assert page.startswith(f"# Out of memory: {title}\n")
    assert note.startswith(f"VRAMMonitor: {title}. What helps: ")
    assert note.endswith(f"Report: {tmp_path / 'out_of_memory.md'}")


@pytest.mark.usefixtures("unmeasured")
def test_the_layer_and_the_line_are_named(make_trainer, tmp_path):
    _, page = explain(make_trainer, tmp_path, Lit("layer"))
    assert "| where | the forward of `layers.1` |" in page
    assert re.search(r"\| your line \| `test_out_of_memory.py:\d+: raise torch.OutOfMemoryError", page)
    assert "| asked for | 20.00 MiB |" in page
    assert "| train, epoch 0, batch 0 |" in page


@pytest.mark.usefixtures("unmeasured")
def test_weights_that_do_not_fit(make_trainer, tmp_path, monkeypatch):
    module = Lit("nowhere")
    monkeypatch.setattr(module, "to", lambda *_: run_out(module.head.weight))
    _, page = explain(make_trainer, tmp_path, module)
    assert page.startswith("# Out of memory: the weights alone do not fit\n")


@pytest.mark.usefixtures("unmeasured")
def test_a_second_copy_on_resume(make_trainer, tmp_path, monkeypatch):
    first = make_trainer(default_root_dir=tmp_path, max_epochs=1)
    first.fit(Lit("nowhere"))
    first.save_checkpoint(tmp_path / "state.ckpt")
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", lambda self, state: run_out(torch.ones(1)))
    trainer = make_trainer(callbacks=[VRAMMonitor()], default_root_dir=tmp_path, max_epochs=2)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(Lit("nowhere"), ckpt_path=tmp_path / "state.ckpt")
    title = "# Out of memory: a checkpoint was a second copy of the model\n"
    assert (tmp_path / "out_of_memory.md").read_text().startswith(title)


@pytest.mark.parametrize(
    ("error", "said"), [(KeyError("planted"), "KeyError: 'planted'"), (KeyboardInterrupt(), "KeyboardInterrupt: ")]
)
def test_a_page_that_fails_hides_nothing(error, said, make_trainer, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(out_of_memory, "_facts", fail)
    trainer = make_trainer(callbacks=[VRAMMonitor()], default_root_dir=tmp_path)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(Lit("step"))
    assert caught.value.__notes__[-1] == f"VRAMMonitor could not write its report: {said}"


class LitGPT(ByteGPT):
    """Runs out of memory at the end of the forward of its second batch."""

    fails = True
    validation_step = pl.LightningModule.validation_step

    def training_step(self, batch):
        loss = super().training_step(batch)
        return run_out(loss, free=0, process=80) if self.fails and self.global_step == 1 else loss

    def train_dataloader(self):
        return DataLoader(torch.randint(256, (16, 129), generator=torch.Generator().manual_seed(0)), batch_size=8)


def make_gpt(fails=False):
    pl.seed_everything(0, verbose=False)
    module = LitGPT(num_layers=3, width=64, sequence_length=128)
    module.fails = fails
    return module


@pytest.mark.slow
def test_remedies_save_what_the_page_says(make_trainer, tmp_path):
    own = InPlaceFusion()

    def peak(*callbacks):
        monitor = VRAMMonitor(track=True, path=None)
        make_trainer(callbacks=[monitor, own, *callbacks], max_epochs=1, limit_val_batches=0).fit(make_gpt())
        return monitor.peaks["train"].peak_allocated_bytes

    _, page = explain(make_trainer, tmp_path, make_gpt(fails=True), own, limit_val_batches=0)
    (baseline,) = re.findall(r"\| 1 \| ([\d.]+) MiB \| .* \| baseline \|", page)
    rows = re.findall(r"\| ([\d.]+) MiB \| .* \| `callbacks=(\[.*?\])` \|", page)
    savings = {code: float(baseline) - float(needed) for needed, code in rows}
    told = {code: saving * MIB for code, saving in savings.items() if saving >= 1}
    plain_bytes = peak()
    assert any("ActivationCheckpointing(" in code for code in told)
    assert "| * " not in page  # a fused step is too small for what is missing
    for code, told_bytes in told.items():
        callbacks = eval(code, vars(lightning_vram))  # as pasted into a Trainer
        saved_bytes = plain_bytes - peak(*callbacks)
        assert saved_bytes == pytest.approx(told_bytes, rel=0.1), (code, format_bytes(saved_bytes))


class Alerts(pl.Callback):
    """Logs by hand, and tells others when a run fails or is done."""

    num_alerts = 0

    def on_train_batch_start(self, trainer, *_):
        trainer.logger.log_metrics({"value": 1.0})

    def on_exception(self, trainer, pl_module, exception):
        type(self).num_alerts += 1

    def on_train_end(self, trainer, pl_module):
        raise AssertionError("it is not done")

    on_train_epoch_end = on_fit_end = on_train_end


@pytest.fixture
def only_baseline(monkeypatch):
    """Each look at the clock takes longer than what may be tried."""
    monkeypatch.setattr(out_of_memory, "monotonic", count(0, 40).__next__)


@pytest.mark.usefixtures("only_baseline")
def test_what_a_user_does_at_the_end_is_not_done_for_the_page(make_trainer, tmp_path):
    logger = CSVLogger(tmp_path / "logs")
    monitor = VRAMMonitor()
    trainer = make_trainer(callbacks=[monitor, Alerts()], max_epochs=1, logger=logger, log_every_n_steps=1)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(Lit("layer"))
    assert Alerts.num_alerts == 1
    assert "not estimated" not in (Path(logger.log_dir) / "out_of_memory.md").read_text()
    assert len(logger.experiment.metrics) <= 1


@pytest.mark.usefixtures("only_baseline")
def test_what_is_left_of_others_is_told_apart(make_trainer, tmp_path):
    _, page = explain(make_trainer, tmp_path, Lit("step", allocated=78, cached=1))
    assert page.startswith("# Out of memory: other tensors of this process are on the device\n")
    assert re.search(r"\| not of this run \| 77\.\d\d MiB \|", page)
    # More was asked for than the step uses: nothing is available that a picture could show.
    assert not (tmp_path / "out_of_memory.png").exists()
    assert ".png" not in page


@pytest.mark.usefixtures("only_baseline")
def test_the_picture_says_what_its_line_is(make_trainer, tmp_path, monkeypatch):
    if find_spec("matplotlib") is None:
        pytest.skip("the extra plots")
    drawn = []
    monkeypatch.setattr(out_of_memory, "picture", lambda *arguments: drawn.append(arguments) or picture(*arguments))
    _, page = explain(make_trainer, tmp_path, Lit("logits", asked=2))
    ((estimate, title),) = drawn
    available = format_bytes(estimate.peak_bytes - 2 * MIB)
    needed = format_bytes(estimate.peak_bytes)
    assert title == f"Out of memory: this step needs {needed}, available to this step: {available}"
    assert limit_line(estimate) == f"available to this step {available}"
    assert (tmp_path / "out_of_memory.png").exists()
    assert "![A step of this run on fake tensors](out_of_memory.png)\n\nAvailable to this step: the memory that" in page


NOT_TRIED = re.compile(r"Stopped at the limit of 30 s: (\d+) more configurations not tried\.")


def test_after_30_seconds_nothing_more_is_tried(make_trainer, tmp_path, monkeypatch):
    """Each look at the clock takes 6 seconds, and so does a step."""
    monkeypatch.setattr(out_of_memory, "monotonic", count(0, 6).__next__)
    note, page = explain(make_trainer, tmp_path, Lit("layer"))
    assert NOT_TRIED.findall(note) == NOT_TRIED.findall(page)
    (num_left_out,) = NOT_TRIED.findall(page)
    assert int(num_left_out) >= 8


class LitInterrupted(LitGPT):
    """Somebody presses Ctrl-C in a step on tensors without memory."""

    num_left = 0

    def training_step(self, batch):
        if isinstance(batch, FakeTensor):
            type(self).num_left -= 1  # of all copies
            if self.num_left < 0:
                raise KeyboardInterrupt
        return super().training_step(batch)


@pytest.mark.slow_except("baseline")
@pytest.mark.parametrize(
    ("num_steps", "words"),
    [
        (0, "The saving of each feature was not estimated: stopped by Ctrl-C."),
        (12, "other configurations were not tried."),  # two steps of each
    ],
    ids=["baseline", "a later one"],
)
def test_ctrl_c_ends_the_advice_and_hides_nothing(num_steps, words, make_trainer, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    module = LitInterrupted(num_layers=2, width=64, sequence_length=128)
    LitInterrupted.num_left = num_steps
    _, page = explain(make_trainer, tmp_path, module, limit_val_batches=0)  # raises that memory has run out
    assert words in page
    assert ("| exact | baseline |" in page) == (num_steps > 0)
    assert signal.getsignal(signal.SIGINT) is before  # Lightning ignores it once it has seen one
    assert "## What held the memory" in page
