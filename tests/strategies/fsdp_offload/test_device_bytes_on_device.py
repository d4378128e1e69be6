"""``device_bytes`` on an accelerator: what stays there is within it, and grows with it."""

import threading
import time
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.devices import ACCELERATOR, DEVICE, device_module
from support.helpers import assert_equal_weights
from support.offload_nets import Split
from torch import Tensor
from torch.testing import assert_close

from lightning_vram import LeanMixedPrecision
from lightning_vram.core.processes import leave_group
from lightning_vram.optimizers import on_host
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

pytestmark = [
    pytest.mark.device,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Lightning, about folders that exist
]
SHARES = (0.0, 0.1, 0.25, 0.4, 0.8, 0.99, 1.0)
STEPS = 6


class Weighed(Split):
    """Adds up, after each step, what of weights, gradients, moments and copies is on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def on_train_batch_end(self, *unused: Any) -> None:
        self.trainer.strategy._finish_steps()
        held: list[Tensor | None] = []
        for group in self.trainer.strategy._sharding.groups:
            held += [tensor for flat_shard in group.flat_shards for tensor in (flat_shard.shards, flat_shard.resident)]
        for parameter in self.parameters():
            state = self.trainer.optimizers[0].state[parameter]
            held += [parameter.grad, state.get("exp_avg"), state.get("exp_avg_sq")]
        plain = [getattr(tensor, "_local_tensor", tensor) for tensor in held if tensor is not None]
        self.sizes.append(sum(tensor.nbytes for tensor in plain if tensor.device.type == DEVICE))


@pytest.fixture
def train(fit: Any) -> Any:
    def train(*callbacks: pl.Callback, offload: Any = "params", device_bytes: Any = None, **options: Any) -> Weighed:
        strategy = FSDPOffloadStrategy(offload=offload, device_bytes=device_bytes, min_params=100)
        defaults = {"accelerator": ACCELERATOR, "devices": 1, "max_epochs": 2, "gradient_clip_val": 0.1}
        model = fit(Weighed, *callbacks, strategy=strategy, **{**defaults, **options})
        leave_group()
        return model

    return train


@pytest.mark.parametrize(("precision", "tolerance", "accumulate"), [("32-true", 2e-6, 3), ("bf16-mixed", 2e-4, 1)])
def test_what_stays_on_the_device_is_within_the_budget_and_grows_with_it(precision, tolerance, accumulate, train):
    options = {"precision": precision, "accumulate_grad_batches": accumulate}
    state_bytes = 16 * sum(parameter.numel() for parameter in Split().parameters())
    expected = train(**options)
    assert set(expected.sizes) == {0}
    before = 0
    for share in SHARES:
        ours = train(device_bytes=share, **options)
        assert len(ours.sizes) == STEPS
        assert before <= max(ours.sizes) <= int(share * state_bytes)
        # AdamW's kernel on the host rounds otherwise
        assert_close(ours.cpu().state_dict(), expected.cpu().state_dict(), rtol=0, atol=tolerance)
        before = max(ours.sizes)
    assert before == state_bytes


def test_gradients_that_come_in_two_threads_begin_one_step(train, monkeypatch):
    expected, is_begun, rounds = train(device_bytes=0.3, gradient_clip_val=None), threading.Semaphore(0), []
    landed = on_host.HostOptimizers._landed

    class SlowRound(on_host.rounds.StepRound):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            rounds.append(threading.get_ident())
            is_begun.release()
            time.sleep(0.1)
            super().__init__(*args, **kwargs)

    def land(self, group):
        if group.landing is None:  # in the thread of the backward, while that of the transfers is beginning the step
            is_begun.acquire(timeout=10)
        landed(self, group)

    monkeypatch.setattr(on_host.rounds, "StepRound", SlowRound)
    monkeypatch.setattr(on_host.HostOptimizers, "_landed", land)
    ours = train(device_bytes=0.3, gradient_clip_val=None)
    assert len(rounds) == STEPS
    assert_equal_weights(ours, expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_the_first_step_leaves_free_holds_copies(precision, train):
    expected = train(offload="optimizer", precision=precision)
    ours = train(device_bytes="auto", precision=precision)
    assert_equal_weights(ours, expected)
    assert ours.sizes[0] == 0 or ours.sizes[0] == expected.sizes[0]
    assert ours.sizes[1:] == expected.sizes[1:]


def test_where_nothing_is_free_there_are_no_copies(train):
    memory, total_bytes = device_module(), device_module().mem_get_info()[1]
    expected = train()
    memory.set_per_process_memory_fraction(min(1.0, (memory.memory_allocated() + total_bytes // 10) / total_bytes))
    assert_equal_weights(ours := train(device_bytes="auto"), expected)
    assert set(ours.sizes) == {0}


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(None, 0.5), (0.5, 1.0), (1.0, None)])
def test_states_are_loaded_to_where_their_shards_are(saved_by, loaded_by, train, tmp_path):
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    expected = train(saver, device_bytes=saved_by, enable_checkpointing=True)
    resumed = train(device_bytes=loaded_by, ckpt_path=tmp_path / "step=3.ckpt")
    assert max(resumed.sizes) == max(train(device_bytes=loaded_by, max_steps=1).sizes)
    assert_close(resumed.cpu().state_dict(), expected.cpu().state_dict(), rtol=0, atol=2e-6)


def test_gradients_that_are_scaled_are_where_their_shards_are(train):
    ours, expected = (train(device_bytes=share, plugins=[LeanMixedPrecision("fp16")]) for share in (0.5, None))
    assert_close(ours.cpu().state_dict(), expected.cpu().state_dict(), rtol=0, atol=1e-3)
