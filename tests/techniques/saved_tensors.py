"""Networks whose saved tensors are compressed and offloaded, and what is compared."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_vram.demos import ByteGPT


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def byte_gpt() -> tuple[nn.Module, Callable[[], Tensor]]:
    net, tokens = ByteGPT(1, 32, 4, 32, dropout=0.5).train(), torch.randint(256, (4, 33))
    return net, lambda: F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def lstm() -> tuple[nn.Module, Callable[[], Tensor]]:
    net, x = nn.LSTM(8, 16, 2, dropout=0.5), torch.randn(12, 4, 8)
    return net, lambda: net(x)[0].square().mean()


def attention() -> tuple[nn.Module, Callable[[], Tensor]]:
    net, x = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True), torch.randn(3, 9, 16)
    mask = torch.rand(3, 9) > 0.8
    return net, lambda: net(x, x, x, key_padding_mask=mask)[0].square().mean()


@contextmanager
def both(outer: AbstractContextManager, inner: AbstractContextManager) -> Iterator[None]:
    with outer, inner:
        yield
