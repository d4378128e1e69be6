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


def in_blocks(bits: int = 8) -> int:
    """Bytes of two moments in so many bits: numbers, and a scale for each 128 or a smaller tensor."""
    sizes = [p.numel() for p in TinyGPT().parameters()]
    block = 128 * bits // 8 + 4
    return 2 * sum(-(-size * bits // 8) + 4 if size < 128 else -(-size // 128) * block for size in sizes)


def message(num_ranks: int, states: int, available: int) -> str:
    needed, margin = 2 * WEIGHTS + states, WEIGHTS + states - (num_ranks - 1) * WEIGHTS
    states_text = f", optimizer state {format_bytes(states)}" if states else ""
    ranks = f" for its {num_ranks} ranks" if num_ranks > 1 else ""
    return (
        f"ForkingOffload needs {format_bytes(needed)} of host memory on {socket.gethostname()}{ranks}: weights "
        f"{format_bytes(WEIGHTS)}, gradients {format_bytes(WEIGHTS)}{states_text}. Available are "
        f"{format_bytes(available + num_ranks * WEIGHTS)}, including the memory of the module, of which "
        f"{format_bytes(margin)} must stay free. Set nvme_path='/a/fast/disk' (moves the optimizer state there), "
        "host_state='bf16', '8bit' or '4bit', master='split' or precision='bf16-true', or use more machines."
    )


def test_weights_and_gradients_are_refused_before_anything_is_sharded(
    host: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shard(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(FullSharding, "__init__", shard)
    host(WEIGHTS)
    with pytest.raises(OffloadError) as raised:
        make_trainer(strategy=ForkingOffload(nvme_path="/"), max_steps=1).fit(Fused())
    assert str(raised.value) == message(1, 0, WEIGHTS)


class Untrained(Fused):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError


def test_states_are_refused_before_training_and_the_module_is_what_it_was(host: Any, make_trainer: Any) -> None:
    host(5 * WEIGHTS)  # for gradients and as much again, not for 3 and as much again
    model, trainer = Untrained(), make_trainer(strategy=ForkingOffload(), max_steps=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(OffloadError) as raised:
        trainer.fit(model)
    assert str(raised.value) == message(1, 2 * WEIGHTS, 5 * WEIGHTS)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    host(6 * WEIGHTS)
    make_trainer(strategy=ForkingOffload(), max_steps=1).fit(Fused())


@pytest.mark.parametrize(("host_state", "states"), [("bf16", WEIGHTS), ("8bit", in_blocks()), ("4bit", in_blocks(4))])
def test_moments_in_fewer_bytes_need_less(host: Any, make_trainer: Any, host_state: str, states: int) -> None:
    needed = 2 * WEIGHTS + states
    host(needed + (needed - WEIGHTS) - WEIGHTS - 1)  # a byte less than that and what must stay free
    with pytest.raises(OffloadError) as raised:
        make_trainer(strategy=ForkingOffload(host_state=host_state), max_steps=1).fit(Untrained())
    assert f", optimizer state {format_bytes(states)}. " in str(raised.value)
    host(needed + (needed - WEIGHTS) - WEIGHTS)
    make_trainer(strategy=ForkingOffload(host_state=host_state), max_steps=1).fit(Fused())


def test_an_average_of_weights_is_counted(host: Any, make_trainer: Any) -> None:
    def fit(available: int, model: Any) -> None:
        host(available)
        make_trainer(strategy=ForkingOffload(), callbacks=[EMAWeightAveraging()], max_steps=1).fit(model)

    needed, given_back = 5 * WEIGHTS, 2 * WEIGHTS
    with pytest.raises(OffloadError) as raised:
        fit(needed + (needed - given_back) - given_back - 1, Untrained())
    assert f", averages of weights {format_bytes(WEIGHTS)}, optimizer state {format_bytes(2 * WEIGHTS)}. " in str(
        raised.value
    )
    fit(needed + (needed - given_back) - given_back, Fused())


@pytest.mark.parametrize(("arguments", "method"), [({"offload": "none"}, "fit"), ({}, "validate")])
def test_what_keeps_nothing_more_on_the_host_is_not_refused(
    host: Any, make_trainer: Any, arguments: dict[str, Any], method: str
) -> None:
    host(0)
    getattr(make_trainer(strategy=ForkingOffload(**arguments), max_steps=1), method)(Fused())


def test_two_ranks_share_the_host_and_both_refuse(host: Any, make_trainer: Any) -> None:
    host(WEIGHTS)
    with pytest.raises(Exception, match=r"OffloadError: ForkingOffload needs .* for its 2 ranks: weights"):
        make_trainer(strategy=ForkingOffload(), devices=2, max_steps=1).fit(Split())
