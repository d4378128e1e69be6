"""Moments in bfloat16 without Lightning: their bytes, and FSDP2."""

import copy
from functools import partial

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_vram import track_memory
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.optimizers.narrow import NarrowMoments
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def test_the_tracker_counts_four_bytes_for_each_weight() -> None:
    def state_bytes(is_narrow: bool) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        narrow = NarrowMoments(model)
        if is_narrow:
            narrow.attach([optimizer])
        else:
            narrow.let_go()
        with track_memory(model, optimizers=[optimizer]) as tracker:
            for _ in range(2):
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
        assert sum(p.numel() for p in model.parameters()) == 16576
        steps = sum(state["step"].nbytes for state in optimizer.state.values())
        timeline = tracker.timeline
        of_state = {n for n, one in enumerate(timeline.allocations) if one.category is Category.OPTIMIZER_STATE}
        return sum(event.change_bytes for event in timeline.events if event.allocation in of_state) - steps

    assert state_bytes(is_narrow=True) == 4 * 16576
    assert state_bytes(is_narrow=False) == 8 * 16576


def train(optimizer: torch.optim.Optimizer, model: nn.Module, num_steps: int) -> None:
    for step in range(num_steps):
        model(torch.linspace(-1, 1, 32).view(2, 16) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_under_fsdp2_moments_are_sharded_and_weights_are_the_same(mesh):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 4))
    sharded = copy.deepcopy(plain)
    for part in (sharded[0], sharded[2], sharded):
        fully_shard(part, mesh=mesh)
    optimizers = [ADAMW(plain.parameters()), ADAMW(sharded.parameters())]
    for model, optimizer in zip((plain, sharded), optimizers, strict=True):
        NarrowMoments(model).attach([optimizer])
        train(optimizer, model, 3)
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local_part(ours), theirs)
        moment = optimizers[1].state[ours]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert moment.dtype == torch.bfloat16
    saved = get_optimizer_state_dict(sharded, optimizers[1])
    set_optimizer_state_dict(sharded, optimizers[1], saved)
    for model, optimizer in zip((plain, sharded), optimizers, strict=True):
        train(optimizer, model, 2)
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local_part(ours), theirs)
        assert optimizers[1].state[ours]["exp_avg"].dtype == torch.bfloat16
