"""A budget with two remedies: what the bus carries in time is offloaded, the rest is recomputed."""

import re

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
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

    def train_dataloader(self):
        return DataLoader(torch.randn(4 * 8192, 32), batch_size=8192)


def both(**arguments) -> ActivationCheckpointing:
    return ActivationCheckpointing(layers="layers.*", budget="24MiB", remedies=BOTH, **arguments)


class LookAtOffload(pl.Callback):
    """Notes what each step sends away."""

    def __init__(self, callback) -> None:
        self.callback, self.sent = callback, []

    def on_train_batch_end(self, *_):
        self.sent.append(self.callback._offload.offloading.report.offloaded_bytes)


def test_weights_are_those_of_the_plain_run_to_the_bit(same_as_baseline):
    callback = both(offload_bytes="16MiB")
    look = LookAtOffload(callback)
    planned, plain = same_as_baseline(Model, look, callback)
    assert look.sent[0] == 0
    assert all(0 < sent <= 17 * 2**20 for sent in look.sent[1:])  # one storage more than is planned
    assert [type(module) for module in planned.modules()] == [type(module) for module in plain.modules()]
    assert callback._offload is None


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([both()], r"but the model is on the CPU: nothing is saved\. Leave"),
        ([both(offload_bytes="16MiB"), ActivationOffload()], r"does not work with ActivationOffload\. Remove one"),
    ],
)
def test_what_gains_nothing_or_offloads_twice_is_refused(callbacks, message, fit):
    with pytest.raises(MisconfigurationException, match=message):
        fit(Model, *callbacks)


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
@pytest.mark.parametrize(("share", "bus_share"), [(0.5, 0.25), (0.3, 1.0), (0.5, None)])
def test_on_a_card_the_budget_is_kept_with_less_recomputation(share, bus_share):
    """Without a given share, a card that nobody told the bus of takes a usual one."""
    plain_peak, plain = traced()
    budget_bytes = int(share * plain_peak)
    offload_bytes = "auto" if bus_share is None else int(bus_share * plain_peak)
    _, recomputed = traced(ActivationCheckpointing(budget=f"{budget_bytes}B"))
    peak, both = traced(ActivationCheckpointing(budget=f"{budget_bytes}B", remedies=BOTH, offload_bytes=offload_bytes))
    assert peak <= budget_bytes
    assert 0 < both.to_host < (plain.compute if bus_share is None else float("inf"))
    assert plain.compute <= both.compute < recomputed.compute
