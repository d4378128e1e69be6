import logging
import random
import re
from contextlib import nullcontext

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import BATCH_SIZE, ForkingOffload, LitTiny, TinyCNN, TinyGPT, assert_equal_weights
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_vram import ActivationCheckpointing, MemoryBudget, estimate_memory
from lightning_vram.callbacks.memory_budget import callback
from lightning_vram.estimation.estimate import Estimator

pytestmark = pytest.mark.filterwarnings("ignore:MemoryBudget. Does not fit")


class Drawing(Dataset):
    """Draws from generators of its own, and from the global ones."""

    def __init__(self) -> None:
        self.own = numpy.random.default_rng(3)
        self.transforms = [random.Random(4)]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int):
        noise = self.own.random() + self.transforms[0].random() + random.random() + numpy.random.rand()
        return torch.randn(3, 8, 8) + noise, index % 10


class Lines(IterableDataset):
    """Goes on where it was left, as a file does."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self):
        while self.place < 12:
            self.place += 1
            yield torch.full((3, 8, 8), float(self.place)), self.place % 10


class Once(IterableDataset):
    def __init__(self) -> None:
        self.samples = ((torch.zeros(3, 8, 8), 0) for _ in range(12))

    def __iter__(self):
        return self.samples


def make_model():
    return LitTiny(TinyCNN())


def fit_on(make_trainer, loader, *callbacks):
    pl.seed_everything(0, verbose=False)
    model = make_model()
    make_trainer(callbacks=list(callbacks), max_epochs=1).fit(model, loader)
    return model


def own_order():
    return DataLoader(Drawing(), batch_size=BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("load", [own_order, lambda: DataLoader(Lines(), batch_size=4)])
def test_the_run_sees_the_same_data_and_random_numbers(load, make_trainer, caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        checked = fit_on(make_trainer, load(), MemoryBudget())
    assert "MemoryBudget: Fits: " in caplog.text
    assert_equal_weights(checked, fit_on(make_trainer, load()))


def test_what_can_be_read_once_is_not_read(make_trainer):
    message = (
        "MemoryBudget cannot estimate whether the run fits: ValueError: reading Once would consume a batch of the run, "
        "and it cannot be copied. Training continues."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        checked = fit_on(make_trainer, DataLoader(Once(), batch_size=4), MemoryBudget())
    assert_equal_weights(checked, fit_on(make_trainer, DataLoader(Once(), batch_size=4)))


def test_the_estimate_is_that_of_the_same_arguments(fit, monkeypatch):
    estimates = spy(monkeypatch)
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}
    fit(make_model, MemoryBudget(), ActivationCheckpointing(), limit_val_batches=None, **arguments)
    trainer = {**arguments, "callbacks": [ActivationCheckpointing()]}
    alone = estimate_memory(make_model(), device="cpu", trainer=trainer, find_limits=False)
    assert [each.peak_bytes for each in estimates] == [alone.peak_bytes]


def spy(monkeypatch):
    made = []

    class Spy(Estimator):
        def estimate(self):
            made.append(super().estimate())
            return made[-1]

    monkeypatch.setattr(callback, "Estimator", Spy)
    return made


@pytest.mark.slow
def test_a_run_that_does_not_fit_ends_before_it_begins(make_trainer):
    begun = []

    class Begins(LitTiny):
        def configure_model(self):
            begun.append(self.trainer)

    trainer = make_trainer(callbacks=[MemoryBudget("200000B", on_excess="error")])
    with pytest.raises(MisconfigurationException) as caught:
        trainer.fit(Begins(TinyGPT()))
    assert re.fullmatch(
        r"MemoryBudget: Does not fit: 2\d\d.\d\d KiB of 195.31 KiB on cpu, "
        r"\d+.\d\d KiB too much. Largest category: activations, \d+.\d\d KiB; the largest module is "
        r"net.blocks.0.self_attn with \d+.\d\d KiB. The batch has 4 samples, 2 would fit. What helps: a smaller batch "
        r"with accumulate_grad_batches, MicroBatching\('auto'\), ActivationCheckpointing\(\) or ActivationOffload\(\).",
        str(caught.value),
    )
    assert trainer not in begun


def test_a_warning_lets_the_run_go_on(same_as_baseline):
    with pytest.warns(UserWarning, match=r"^MemoryBudget: Does not fit. .* The batch has 4 samples, and not even"):
        same_as_baseline(make_model, MemoryBudget("10000B"))


def test_a_step_that_cannot_be_estimated_runs(make_trainer):
    class Fails(LitTiny):
        def training_step(self, batch, batch_idx):
            if not any(isinstance(callback, MemoryBudget) for callback in self.trainer.callbacks):  # in an estimate
                raise RuntimeError("of the step")
            return super().training_step(batch, batch_idx)

    message = r"^MemoryBudget cannot estimate whether the run fits: .*\. Training continues\.$"
    with pytest.warns(UserWarning, match=message):
        make_trainer(callbacks=[MemoryBudget(on_excess="error")]).fit(Fails(TinyCNN()))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"limit": 20}, ValueError, "MemoryBudget(limit) has no unit, got 20: write '20GiB'."),
        ({"limit": "0 GiB"}, ValueError, "MemoryBudget(limit) must be above 0, got '0 GiB'."),
        (
            {"limit": 1.5},
            ValueError,
            "MemoryBudget(limit) as a share of the device must be above 0 and at most 1, got 1.5.",
        ),
        (
            {"limit": None},
            TypeError,
            "MemoryBudget(limit) must be 'auto', bytes, text such as '20GiB', or a share, got None of type NoneType.",
        ),
        (
            {"limit": "much"},
            ValueError,
            "MemoryBudget(limit) must be a number and one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB, got 'much'.",
        ),
        ({"on_excess": "stop"}, ValueError, "MemoryBudget(on_excess) must be 'warn' or 'error', got 'stop'."),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        MemoryBudget(**arguments)


def test_two_are_refused(fit):
    message = r"^MemoryBudget can be used once, got several: a device has one budget\. Remove all but one\.$"
    with pytest.raises(MisconfigurationException, match=message):
        fit(make_model, MemoryBudget(), MemoryBudget())


@pytest.mark.slow
@pytest.mark.distributed
def test_all_ranks_decide_alike(make_trainer):
    callback = MemoryBudget("1000B", on_excess="error")
    trainer = make_trainer(callbacks=[callback], strategy=ForkingOffload(), devices=2)
    with pytest.raises(Exception, match=r"MemoryBudget: Does not fit"):
        trainer.fit(make_model())


def test_progress_is_shown(make_trainer, monkeypatch):
    seen = []
    monkeypatch.setattr(callback, "show_progress", lambda trainer: nullcontext(lambda stage, done: seen.append(stage)))
    make_trainer(callbacks=[MemoryBudget("1B")], max_steps=1).fit(LitTiny(TinyCNN()))
    assert seen == ["tracing the step", "searching for the largest batch"]
