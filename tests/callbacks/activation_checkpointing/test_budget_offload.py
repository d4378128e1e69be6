"""A budget with two remedies: what the bus carries in time is offloaded, the rest is recomputed."""

import copy
import re

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import assert_equal_weights
from torch import nn
from torch.utils.data import DataLoader

from lightning_vram import ActivationCheckpointing, ActivationOffload
from lightning_vram.demos import ByteGPT
from lightning_vram.estimation.traced_fit import STEP, FitRun, trace_fit
from lightning_vram.memory.estimate.device_spec import find_device
from lightning_vram.memory.tracking.timeline import Category

BOTH = ("recompute", "offload")
CALLBACK = "ActivationCheckpointing"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        pytest.param(
            {"budget": "1GiB", "remedies": "offload"}, TypeError,
            f"{CALLBACK}(remedies) must be a list or tuple of names, got 'offload' of type str.", id="a name",
        ),
        pytest.param(
            {"budget": "1GiB", "remedies": ("offload",)}, ValueError,
            f"{CALLBACK}(remedies) must be ('recompute',) or ('recompute', 'offload'), got ('offload',).", id="one",
        ),
        pytest.param(
            {"remedies": BOTH}, ValueError,
            f"{CALLBACK}(remedies) needs a budget to meet, got ('recompute', 'offload') without one. "
            "Set budget='6GiB'.", id="no budget",
        ),
        pytest.param(
            {"budget": "1GiB", "offload_bytes": "1GiB"}, ValueError,
            f"{CALLBACK}(offload_bytes='1GiB') limits offload, which is off. "
            "Set remedies=('recompute', 'offload').", id="no offload",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused(arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        ActivationCheckpointing(**arguments)


class Model(pl.LightningModule):
    """Its activations are large enough to travel, its weights are small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.GELU()) for _ in range(8)
        )

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = batch + layer(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(model, *callbacks):
    torch.manual_seed(1)
    loader = DataLoader(torch.randn(4 * 8192, 32), batch_size=8192)
    trainer = pl.Trainer(
        callbacks=list(callbacks), max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(2)
    trainer.fit(model, loader)


class LookAtOffload(pl.Callback):
    """Notes what each step sends away."""

    def __init__(self, callback) -> None:
        self.callback, self.sent = callback, []

    def on_train_batch_end(self, *_):
        self.sent.append(self.callback._offload.offloading.report.offloaded_bytes)


def test_weights_are_those_of_the_plain_run_to_the_bit():
    torch.manual_seed(0)
    plain = Model()
    planned = copy.deepcopy(plain)
    kinds = [type(module) for module in planned.modules()]
    callback = ActivationCheckpointing(layers="layers.*", budget="24MiB", remedies=BOTH, offload_bytes="16MiB")
    look = LookAtOffload(callback)
    fit(plain)
    fit(planned, look, callback)
    assert_equal_weights(planned, plain)
    assert look.sent[0] == 0
    assert all(0 < sent <= 17 * 2**20 for sent in look.sent[1:])  # one storage more than is planned
    assert [type(module) for module in planned.modules()] == kinds
    assert callback._offload is None


def test_on_the_host_nothing_is_gained():
    callback = ActivationCheckpointing(layers="layers.*", budget="24MiB", remedies=BOTH)
    with pytest.raises(MisconfigurationException, match=r"but the model is on the CPU: nothing is saved\. Leave"):
        fit(Model(), callback)


def test_two_that_offload_are_refused():
    callback = ActivationCheckpointing(layers="layers.*", budget="24MiB", remedies=BOTH, offload_bytes="16MiB")
    with pytest.raises(MisconfigurationException, match=r"does not work with ActivationOffload\. Remove one"):
        fit(Model(), callback, ActivationOffload())


def traced(*callbacks):
    """Peak of activations of a planned step on a card, and its times."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = ByteGPT(num_layers=6, width=256, num_heads=4, sequence_length=512)
    tokens = torch.zeros(8, 513, dtype=torch.int64)
    run = FitRun({"callbacks": list(callbacks)}, find_device("h100"), with_validation=False, with_times=True)
    fitted = trace_fit(model, tokens, run)
    return fitted.stage(STEP).peak_of(Category.ACTIVATIONS), fitted.times[STEP]


@pytest.mark.slow
@pytest.mark.parametrize("bus_share", [1.0, 0.25])
@pytest.mark.parametrize("share", [0.7, 0.5, 0.3])
def test_on_a_card_the_budget_is_kept_with_less_recomputation(share, bus_share):
    plain_peak, plain = traced()
    budget_bytes = int(share * plain_peak)
    _, recomputed = traced(ActivationCheckpointing(budget=f"{budget_bytes}B"))
    bus_bytes = int(bus_share * plain_peak)
    peak, both = traced(ActivationCheckpointing(budget=f"{budget_bytes}B", remedies=BOTH, offload_bytes=bus_bytes))
    assert peak <= budget_bytes
    assert both.to_host > 0
    assert plain.compute <= both.compute < recomputed.compute


@pytest.mark.slow
def test_a_card_nobody_told_the_bus_of_takes_a_usual_one():
    plain_peak, plain = traced()
    peak, both = traced(ActivationCheckpointing(budget=f"{plain_peak // 2}B", remedies=BOTH))
    assert peak <= plain_peak // 2
    assert 0 < both.to_host < plain.compute
