import logging
import re

import pytest
import torch
from support.devices import ACCELERATOR, DEVICE, allocate_workspaces, at_size, device_module
from support.helpers import LitTiny, TinyCNN

from lightning_vram import MemoryBudget
from lightning_vram.memory.device.accelerators import ProcessLimit
from lightning_vram.memory.units import GIB, MIB, parse_bytes

pytestmark = pytest.mark.device


def test_expected_is_held_against_measured_once(fit, caplog):
    allocate_workspaces()
    others = torch.zeros(MIB, dtype=torch.uint8, device=DEVICE)
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        fit(lambda: LitTiny(TinyCNN()), MemoryBudget(), accelerator=ACCELERATOR, devices=1)
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


def test_limits_within_one_another_are_put_back():
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
