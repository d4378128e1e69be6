import logging
import re

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.devices import ACCELERATOR, DEVICE, allocate_workspaces, at_size, device_module
from support.helpers import LitTiny, TinyCNN, TinyGPT, assert_equal_weights

from lightning_vram import MemoryBudget
from lightning_vram.memory.device.accelerators import ProcessLimit
from lightning_vram.memory.units import GIB, MIB, parse_bytes

pytestmark = pytest.mark.device


def fit(make_trainer, callbacks):
    torch.manual_seed(0)
    model = LitTiny(TinyCNN())
    make_trainer(callbacks=callbacks, accelerator=ACCELERATOR, devices=1).fit(model)
    return model




def test_expected_is_held_against_measured_once(make_trainer, caplog):
    allocate_workspaces()
    others = torch.zeros(MIB, dtype=torch.uint8, device=DEVICE)
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        fit(make_trainer, [MemoryBudget()])
    ((measured, expected),) = re.findall(
        rf"up to the first optimizer step, peak memory on {DEVICE}:0 was (\d.*); predicted: (\d.*) \(",
        caplog.text,
    )
    assert parse_bytes(expected.replace(" ", "")) > 0
    assert parse_bytes(measured.replace(" ", "")) < at_size(64 * MIB, MIB)  # without what was there before
    del others


def test_a_limit_holds_until_the_end_and_no_longer(make_trainer):
    fractions = []

    class Reads(LitTiny):
        def on_train_start(self):
            fractions.append(device_module().get_per_process_memory_fraction(0))

    before = device_module().get_per_process_memory_fraction(0)
    trainer = make_trainer(callbacks=[MemoryBudget(0.5)], accelerator=ACCELERATOR, devices=1, max_epochs=1)
    trainer.fit(Reads(TinyCNN()))
    assert fractions[-1] == pytest.approx(0.5, rel=1e-3)
    assert device_module().get_per_process_memory_fraction(0) == before




def test_a_limit_is_put_back():
    device = torch.device(DEVICE, 0)
    before = device_module().get_per_process_memory_fraction(device)
    outer = ProcessLimit(device, 1 << 60)
    inner = ProcessLimit(device, at_size(GIB, MIB))
    assert device_module().get_per_process_memory_fraction(device) < 1
    inner.remove()
    inner.remove()
    assert device_module().get_per_process_memory_fraction(device) == 1.0
    outer.remove()
    assert device_module().get_per_process_memory_fraction(device) == before
