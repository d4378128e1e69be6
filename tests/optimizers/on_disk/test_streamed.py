"""States on disk under optimizers that step on shards; what each optimizer does there is in optimizer_table.txt."""

import copy

import pytest
from support.sharded_nets import assert_same, make, on_ranks, sharded, take_step, weights
from torch.optim import AdamW

from lightning_vram.optimizers.on_host import HostOptimizers

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


def train(net, seeds, nvme_path=None, state=None):
    with sharded(net) as sharding:
        host = HostOptimizers(sharding, num_threads=1, nvme_path=nvme_path)
        optimizer = AdamW(net.parameters(), lr=1e-2)
        host.attach([optimizer])
        if state is not None:
            optimizer.load_state_dict(state)
        for seed in seeds:
            take_step(net, optimizer, seed)
        state = copy.deepcopy(optimizer.state_dict())
        host.let_go(sharding.remove())
    return weights(net), state


def test_a_state_is_loaded_to_the_disk_and_gone_on_with(mesh, tmp_path):
    expected, _ = train(make(), range(4))
    for first, second in ((None, tmp_path), (tmp_path, None), (tmp_path, tmp_path)):
        net = make()
        _, state = train(net, range(2), first)
        actual, _ = train(net, range(2, 4), second, state)
        assert_same(actual, expected)


def test_two_ranks_stream_their_shards(tmp_path):
    def check():
        expected, _ = train(make(), range(3))
        actual, _ = train(make(), range(3), tmp_path)
        assert_same(actual, expected)

    on_ranks(tmp_path, check)
