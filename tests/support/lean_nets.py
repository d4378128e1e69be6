"""What the tests of lean parameters share: a small network, and gradients that do not come from it."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_vram.optimizers.bf16_weights import LeanParameters

EXACT = ("bf16+master", "bf16+split")


def make_net() -> nn.Sequential:
    """Weights that are no bf16 numbers, of sizes that no vector instruction divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 17), nn.Linear(17, 5))


def lean_net(
    scheme: str, make_optimizer: Callable[[Iterable[Tensor]], Optimizer] = AdamW
) -> tuple[nn.Sequential, LeanParameters, Optimizer]:
    net = make_net()
    lean = LeanParameters(net.parameters(), scheme)
    optimizer = make_optimizer(net.parameters())
    lean.attach([optimizer])
    return net, lean, optimizer


def give_gradients(net: nn.Module, seed: int) -> None:
    """Gradients that bf16 holds, in the dtype of the parameters."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().to(parameter.dtype)


def take_steps(net: nn.Module, optimizer: Optimizer, *seeds: int) -> None:
    for seed in seeds:
        give_gradients(net, seed)
        optimizer.step()


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, actual), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert actual.dtype is expected.dtype, name
        assert torch.equal(actual, expected), name
