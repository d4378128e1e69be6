"""What is known of autograd's hooks."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_vram.techniques.activation_compression.stage import CompressionStage
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation


@pytest.mark.parametrize("make_stage", [partial(CompressionStage, min_bytes=0), partial(Recomputation, min_bytes=0)])
def test_a_users_selective_checkpoint_within_our_hooks_warns_of_nothing(make_stage):
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    x = torch.ones(4, 4, requires_grad=True)
    with make_stage():
        y = checkpoint(lambda x: (x @ x).relu(), x, use_reentrant=False, context_fn=contexts)  # a warning is an error
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 4), 8.0))
