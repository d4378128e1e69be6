"""LeakDetector: what it refuses and says, when it counts, what ranks do, and that it cleans up."""

import gc

import pytest
from lightning.pytorch.callbacks import Callback
from support import leaky_models as leaky
from support.helpers import LitManual, LitTiny, TinyCNN

from lightning_vram.callbacks.leak_detector import LeakDetector
from lightning_vram.callbacks.leak_detector.callback import MemoryLeakError
from lightning_vram.memory.leaks import LeakSearch, LiveBytes, StepWatch


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"patience": 4}, ValueError, r"\(patience\) must be at least 5, got 4\.$"),
        ({"on_leak": "stop"}, ValueError, r"\(on_leak\) must be 'warn' or 'raise', got 'stop'\.$"),
        ({"min_bytes_per_step": 0}, ValueError, r"\(min_bytes_per_step\) must be at least 1, got 0\.$"),
        ({"min_bytes_per_step": "some"}, ValueError, r"\(min_bytes_per_step\) must be a number and one .* 'some'"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match="^LeakDetector" + message):
        LeakDetector(**arguments)


def test_says_what_it_counts(make_trainer, caplog, monkeypatch):
    for read, expected in (
        (lambda self: {"cuda:0": 1, "cpu": 1}, "reads the allocated memory of cuda:0 and cpu after each step."),
        (lambda self: {}, "finds no allocator statistics on this machine: it checks only some of the steps."),
    ):
        monkeypatch.setattr(LiveBytes, "read", read)
        with caplog.at_level("INFO"):
            make_trainer(callbacks=[LeakDetector()], max_epochs=1).fit(leaky.Plain())
        assert f"LeakDetector {expected}" in caplog.messages


@pytest.mark.filterwarnings("ignore:LeakDetector. .* are still in memory when training_step begins")
@pytest.mark.parametrize(
    ("model", "arguments", "num_counts"),
    [
        (leaky.Plain, {}, 6 + 6),  # and as many batches of the validation
        (leaky.Plain, {"accumulate_grad_batches": 3}, 2 + 6),  # in the middle of a window gradients differ
        (lambda: LitManual(TinyCNN()), {"limit_val_batches": 0}, 3),  # once per batch, with two optimizers
    ],
)
def test_counts_once_per_optimizer_step(make_trainer, monkeypatch, model, arguments, num_counts):
    counts = []
    monkeypatch.setattr(LiveBytes, "read", lambda self: counts.append(1) or {"cpu": 1})
    make_trainer(callbacks=[LeakDetector()], max_epochs=1, num_sanity_val_steps=2, **arguments).fit(model())
    assert len(counts) - 1 == num_counts  # one to say on which devices


def test_nothing_of_it_stays_after_a_fit_or_an_error(make_trainer):
    model, detector = leaky.Outputs(), LeakDetector(5, "raise", 2048)
    trainer = make_trainer(callbacks=[detector], max_epochs=5)
    with pytest.raises(MemoryLeakError, match=r"\n  held by self\.cache: a dict of"):
        trainer.fit(model)
    assert not {"training_step", "validation_step"} & vars(trainer.strategy).keys()
    kinds = (StepWatch, LeakSearch)
    gc.collect()
    assert [type(thing).__name__ for thing in gc.get_objects() if type(thing) in kinds] == []


class LeaksOnOneRank(leaky.Losses):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if self.global_rank else self.loss(batch)


@pytest.mark.distributed
def test_all_ranks_raise_at_the_same_batch(make_trainer):
    detector = LeakDetector(5, "raise", 2048)
    trainer = make_trainer(callbacks=[detector], max_epochs=8, strategy="ddp_fork", devices=2, limit_val_batches=0)
    with pytest.raises(Exception, match=r"memory grows with the (training )?steps on"):
        trainer.fit(LeaksOnOneRank())


def test_a_leak_that_is_found_last_is_raised_at_the_end(make_trainer):
    class Finds(Callback):
        def on_validation_end(self, trainer, pl_module):
            detector._to_raise = "found"

    detector = LeakDetector(5, "raise", 2048)
    with pytest.raises(MemoryLeakError, match=r"^found$"):
        make_trainer(callbacks=[detector, Finds()], max_epochs=1, limit_val_batches=1).fit(LitTiny(TinyCNN()))
