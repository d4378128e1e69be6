"""A run that the host has no room for is refused before it is trained: on all ranks, before anything is taken."""

import socket
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from support.helpers import ForkingOffload, TinyGPT
from support.offload_nets import Fused, Split

from lightning_vram.core.host.memory import OffloadError
from lightning_vram.memory.units import format_bytes
from lightning_vram.optimizers import host_memory
from lightning_vram.techniques.sharding import FullSharding

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]
WEIGHTS = 4 * sum(p.numel() for p in TinyGPT().parameters())  # bytes, as many as gradients


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with so much available."""

    def host(available: int) -> None:
        monkeypatch.setattr(host_memory, "available_host_bytes", lambda: available)
        monkeypatch.setattr(host_memory, "free_swap_bytes", lambda: 0)

    return host


def in_blocks() -> int:
    """Bytes of two moments in 8 bits: numbers, and a scale for each 128 or a smaller tensor."""
    sizes = [p.numel() for p in TinyGPT().parameters()]
    return 2 * sum(size + 4 if size < 128 else -(-size // 128) * 132 for size in sizes)


def message(states: int, available: int) -> str:
    states_text = f", optimizer state {format_bytes(states)}" if states else ""
    return (
        f"ForkingOffload needs {format_bytes(2 * WEIGHTS + states)} of host memory on {socket.gethostname()}: weights "
        f"{format_bytes(WEIGHTS)}, gradients {format_bytes(WEIGHTS)}{states_text}. Available are "
        f"{format_bytes(available + WEIGHTS)}, including the memory of the module, of which "
        f"{format_bytes(WEIGHTS + states)} must stay free. Set nvme_path='/a/fast/disk' (moves the optimizer state "
        "there), host_state='bf16', '8bit' or '4bit', master='split' or precision='bf16-true', or use more machines."
    )


def test_weights_and_gradients_are_refused_before_anything_is_sharded(host, fit, monkeypatch):
    monkeypatch.setattr(FullSharding, "__init__", lambda *_: pytest.fail("it is sharded"))
    host(WEIGHTS)
    with pytest.raises(OffloadError) as raised:
        fit(Fused, strategy=ForkingOffload(nvme_path="/"))
    assert str(raised.value) == message(0, WEIGHTS)


class Untrained(Fused):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("offload", "callbacks", "states", "averages"),
    [
        ({}, [], 2 * WEIGHTS, 0),
        ({"host_state": "8bit"}, [], in_blocks(), 0),
        ({}, [EMAWeightAveraging], 2 * WEIGHTS, WEIGHTS),
    ],
    ids=["fp32", "8bit", "average"],
)
def test_states_and_averages_are_refused_before_training_and_the_module_is_what_it_was(
    offload, callbacks, states, averages, host, fit, make_trainer
):
    needed, given_back = 2 * WEIGHTS + states + averages, WEIGHTS + averages
    just_enough = needed + (needed - given_back) - given_back  # as much again must stay free
    host(just_enough - 1)
    model = Untrained()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(OffloadError) as raised:
        make_trainer(strategy=ForkingOffload(**offload), callbacks=[make() for make in callbacks]).fit(model)
    if averages:
        assert f", averages of weights {format_bytes(averages)}, optimizer state " in str(raised.value)
    else:
        assert str(raised.value) == message(states, just_enough - 1)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    host(just_enough)
    fit(Fused, *(make() for make in callbacks), strategy=ForkingOffload(**offload), max_steps=1)


@pytest.mark.parametrize(("arguments", "method"), [({"offload": "none"}, "fit"), ({}, "validate")])
def test_what_keeps_nothing_more_on_the_host_is_not_refused(host, make_trainer, arguments, method):
    host(0)
    getattr(make_trainer(strategy=ForkingOffload(**arguments), max_steps=1), method)(Fused())


def test_two_ranks_share_the_host_and_both_refuse(host, fit):
    host(WEIGHTS)
    with pytest.raises(Exception, match=r"OffloadError: ForkingOffload needs .* for its 2 ranks: weights"):
        fit(Split, strategy=ForkingOffload(), devices=2, max_steps=1)
