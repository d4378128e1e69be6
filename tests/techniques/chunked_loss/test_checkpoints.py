"""Heads in layers that run again in the backward: by then the step has ended."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_vram.techniques.activation_checkpointing import apply_activation_checkpointing, parse_save
from lightning_vram.techniques.chunked_loss import apply_chunked_loss
from tests.techniques.chunked_loss.spellings import TARGET, VOCAB_SIZE, WIDTH


def both(logits: Tensor) -> Tensor:
    """One loss in chunks, and one that needs all logits."""
    return F.cross_entropy(logits.flatten(0, 1), TARGET.flatten()) + logits.cumsum(-1).square().mean()


def apart(logits: Tensor) -> Tensor:
    """Single tokens."""
    return -logits.log_softmax(-1).gather(-1, TARGET[..., None]).mean()


class Top(Module):
    """A head, and what is made of its logits."""

    def __init__(self, loss) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(WIDTH, VOCAB_SIZE), loss

    def forward(self, hidden: Tensor) -> Tensor:
        return self.loss(self.head(hidden))


class Net(Module):
    def __init__(self, loss, run) -> None:
        super().__init__()
        self.embed, self.top, self.run = nn.Embedding(VOCAB_SIZE, WIDTH), Top(loss), run

    def forward(self) -> Tensor:
        return self.run(self.top, self.embed(TARGET))


def keep(logits: Tensor) -> Tensor:
    """The loss comes when the checkpoint has ended."""
    return logits


CHECKPOINTS = {name: partial(checkpoint, use_reentrant=name == "reentrant") for name in ("torch", "reentrant")}


@pytest.mark.parametrize("loss", [both, apart, keep], ids=["both", "apart", "outside"])
@pytest.mark.parametrize("how", ["torch", "reentrant", "inputs", "matmuls"])
def test_a_head_in_a_checkpoint_has_the_gradients_of_whole_logits(how, loss):
    found = []
    for is_chunked in (False, True):
        torch.manual_seed(0)
        net = Net(loss, CHECKPOINTS.get(how, Module.__call__))
        if how not in CHECKPOINTS:
            apply_activation_checkpointing(net, layers="Top", save=parse_save(how, "save"))
        handle = apply_chunked_loss(net, chunk=9)
        with handle.active() if is_chunked else nullcontext():
            value = both(net()) if loss is keep else net()
        value.backward()
        found.append([value.detach(), *(one.grad for one in net.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
