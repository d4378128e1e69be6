"""Planning ends in time, can be interrupted, and shows how far it is."""

import logging
import re
import signal
from collections.abc import Iterator
from itertools import count

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.helpers import assert_equal_weights
from support.planned_models import LitGPT
from torch import Tensor

from lightning_vram import AutoVRAM
from lightning_vram.callbacks.auto_vram import decision
from lightning_vram.memory.units import MIB

PLAIN_BYTES = 16.78 * MIB  # of a step


class Stages(Callback):
    takes_no_memory = True

    def __init__(self, auto: AutoVRAM) -> None:
        self.auto = auto

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.scheme = str(self.auto.scheme)
        self.num_tried = len(self.auto._plan.decision.found.tried)


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes 6 s: a step as it is takes 6 s, and of 30 s there are left those of three more."""
    monkeypatch.setattr(decision, "monotonic", count(0, 6).__next__)
    monkeypatch.setattr(decision, "_LEAST_SECONDS", 30.0)


@pytest.mark.slow
def test_when_time_is_up_the_fastest_that_was_found_is_taken(fit, slow_clock, caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    auto = AutoVRAM(int(0.9 * PLAIN_BYTES))
    stages = Stages(auto)
    packed = fit(LitGPT, auto, stages)
    (line,) = (record.getMessage() for record in caplog.records if "AutoVRAM: Fits with" in record.getMessage())
    assert line.endswith(
        "\nIt is the fastest configuration found in 30 s, the time limit of planning (a tenth of the first epoch, at "
        "least 30 s)."
    )
    assert stages.num_tried <= 4
    assert_equal_weights(fit(LitGPT), packed)


@pytest.mark.slow
def test_when_nothing_fits_by_then_layers_are_checkpointed(fit, slow_clock, monkeypatch):
    monkeypatch.setattr(decision, "_LEAST_SECONDS", 24.0)
    auto = AutoVRAM(int(0.5 * PLAIN_BYTES))
    stages = Stages(auto)
    with pytest.warns(
        UserWarning, match=r"^AutoVRAM cannot plan this run: no configuration that fits was found in 24 s, "
    ) as seen:
        packed = fit(LitGPT, auto, stages)
    (message,) = (str(one.message) for one in seen if "AutoVRAM" in str(one.message))
    assert re.search(r"\nThe run continues without a plan: repeated layers are checkpointed, the limit of", message)
    assert stages.scheme.endswith("ActivationCheckpointing")
    assert_equal_weights(fit(LitGPT), packed)


@pytest.fixture
def _keep_signal() -> Iterator[None]:
    """Lightning ignores SIGINT once it has seen one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_keep_signal")
def test_ctrl_c_ends_the_fit_as_it_always_does(make_trainer, tmp_path):
    class Interrupted(LitGPT):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            assert type(batch) is not Tensor  # the run itself does not begin
            raise KeyboardInterrupt

    pl.seed_everything(0, verbose=False)
    module = Interrupted()
    trainer = make_trainer(callbacks=[AutoVRAM(int(0.5 * PLAIN_BYTES))])
    before, state = list(trainer.callbacks), torch.get_rng_state()
    level = logging.root.manager.disable
    with pytest.raises(SystemExit):
        trainer.fit(module)
    assert trainer.interrupted
    assert trainer.callbacks == before
    assert torch.equal(torch.get_rng_state(), state)
    assert logging.root.manager.disable == level
    assert not list(tmp_path.rglob("*.json"))
