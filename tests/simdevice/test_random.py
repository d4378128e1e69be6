"""Random numbers of the simulated device: generators of its own, kept and brought back as on CUDA."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.sim


def drop():
    return F.dropout(torch.ones(64, device="sim"), 0.5)


def test_a_seed_sets_the_generators_of_host_and_device():
    torch.manual_seed(3)
    first = [torch.rand(4, device="sim"), drop(), torch.randn(2, device="sim")]
    torch.manual_seed(3)
    assert all(map(torch.equal, first, [torch.rand(4, device="sim"), drop(), torch.randn(2, device="sim")]))
    assert torch.sim.initial_seed() == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_draws_the_same_mask_again(use_reentrant):
    masks = []

    def layer(x):
        masks.append(drop())
        return x * masks[-1]

    x = torch.ones(64, device="sim", requires_grad=True)
    output = checkpoint(layer, x, use_reentrant=use_reentrant)
    drop()
    output.sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks)
    assert torch.equal(x.grad, masks[0])
