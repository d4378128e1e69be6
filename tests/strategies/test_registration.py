"""The names by which a Trainer finds the strategy."""

import subprocess
import sys

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import StrategyRegistry
from support.pages import assert_documented

from lightning_vram import FSDPOffloadStrategy
from lightning_vram.strategies.fsdp_offload.strategy import STRATEGY_NAMES, register_strategies


def test_documented():
    assert_documented("FSDPOffloadStrategy")


@pytest.mark.parametrize("name", STRATEGY_NAMES)
def test_a_trainer_finds_the_strategy_by_name(name):
    strategy = pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy
    assert isinstance(strategy, FSDPOffloadStrategy)
    assert strategy.arguments.offload == STRATEGY_NAMES[name]


def test_registering_again_does_nothing():
    before = dict(StrategyRegistry)
    register_strategies()
    assert dict(StrategyRegistry) == before


@pytest.mark.slow
def test_lightnings_own_names_stay_its_own():
    code = (
        "from lightning.pytorch.strategies import StrategyRegistry as r; before = set(r);"
        "import lightning_vram; assert set(r) - before == {'fsdp_offload', 'fsdp_offload_optimizer'};"
        "assert 'fsdp' in r"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_one_process_needs_no_launcher_which_would_set_its_threads(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # else the processes are there already
    trainers = {
        devices: pl.Trainer(strategy="fsdp_offload", accelerator="cpu", devices=devices, logger=False)
        for devices in (1, 2)
    }
    assert trainers[1].strategy.launcher is None
    assert trainers[2].strategy.launcher is not None
    nodes = pl.Trainer(strategy="fsdp_offload", accelerator="cpu", devices=1, num_nodes=2, logger=False)
    assert nodes.strategy.launcher is not None
