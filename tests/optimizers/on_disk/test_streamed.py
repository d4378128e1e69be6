"""States on disk under optimizers that step on shards: the same bits, found by whoever asks for them."""

from pathlib import Path

import pytest
import torch
from support.sharded_nets import Net, assert_same, make, on_ranks, sharded, take_step, weights

from lightning_vram.core.host.memory import OffloadError
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.optimizers.step_round import owner_of

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def train(net, make_optimizer, num_steps, nvme_path=None, state=None, first=0):
    with sharded(net) as sharding:
        host = HostOptimizers(sharding, num_threads=1, nvme_path=nvme_path)
        optimizer = make_optimizer(net.parameters())
        host.attach([optimizer])
        if state is not None:
            optimizer.load_state_dict(state)
        for seed in range(first, first + num_steps):
            take_step(net, optimizer, seed)
        state = optimizer.state_dict()
        copied = {
            index: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in one.items()}
            for index, one in state["state"].items()
        }
        host.let_go(sharding.remove())
    return weights(net), {**state, "state": copied}


def test_a_state_is_loaded_to_the_disk_and_gone_on_with(mesh, tmp_path):
    expected, _ = train(make(Net), OPTIMIZERS["AdamW"], 4)
    for first, second in ((None, tmp_path), (tmp_path, None), (tmp_path, tmp_path)):
        net = make(Net)
        _, state = train(net, OPTIMIZERS["AdamW"], 2, first)
        actual, _ = train(net, OPTIMIZERS["AdamW"], 2, second, state, first=2)
        assert_same(actual, expected)


def test_two_ranks_stream_their_shards(tmp_path):
    on_ranks(tmp_path, _check_two_ranks)


def _check_two_ranks():
    expected, _ = train(make(Net), OPTIMIZERS["AdamW"], 3)
    actual, _ = train(make(Net), OPTIMIZERS["AdamW"], 3, Path("/tmp"))
    assert_same(actual, expected)


@pytest.mark.parametrize(
    ("make_optimizer", "folder", "error", "text"),
    [
        (OPTIMIZERS["AdamW"], "missing", ValueError, "nvme_path must be an existing folder"),
        (torch.optim.Adafactor, ".", ValueError, "nvme_path cannot hold the optimizer state of Adafactor"),
    ],
)
def test_what_cannot_be_streamed_is_refused_and_nothing_is_attached(
    make_optimizer, folder, error, text, mesh, tmp_path
):
    net = make(Net)
    with sharded(net) as sharding:
        host = HostOptimizers(sharding, num_threads=1, nvme_path=tmp_path / folder)
        optimizer = make_optimizer(net.parameters())
        with pytest.raises(error, match=text):
            host.attach([optimizer])
        assert owner_of(optimizer) is None
        host.let_go(sharding.remove())


def test_a_disk_that_is_too_small_is_refused(mesh, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    net = make(Net)
    with sharded(net) as sharding:
        host = HostOptimizers(sharding, num_threads=1, nvme_path=tmp_path)
        with pytest.raises(OffloadError, match=r"needs .* but 100 B are free"):
            host.attach([torch.optim.AdamW(net.parameters())])
        host.let_go(sharding.remove())
