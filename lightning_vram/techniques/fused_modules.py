"""Let a norm and the activation behind it run as one function that keeps the norm's input alone.

Plain autograd keeps the norm's input, its output for the activation, and the activation's output for the next layer.
Here the output of the norm is made again in the backward, by the kernels of the forward, so that gradients are equal
to the bit (those of a double backward up to rounding: they are summed in another order). No dispatch mode,
no cost per operator: the light form of
:mod:`~lightning_vram.techniques.recompute`, which saves more. What it does not see: functional calls, sums, casts, and
the next layer's input. It does not help for activations that keep their output anyway: ReLU, sigmoid, tanh.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_vram.techniques.class_swap import restore_class, swap_class
from lightning_vram.techniques.handover import Handover

_PRODUCER, _CONSUMER = "_fused_norm", "_fused_activation"

FUSED_NORMS: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
FUSED_ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.Mish,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Softplus,
)


class Link(Protocol):
    """A norm whose output goes to one activation, unchanged, and nowhere else."""

    @property
    def producer(self) -> nn.Module:
        """One of :data:`FUSED_NORMS`."""

    @property
    def consumer(self) -> nn.Module:
        """One of :data:`FUSED_ACTIVATIONS`."""


@dataclass(frozen=True)
class _Producer:
    activate: Callable[[Tensor], Tensor]
    handover: Handover


class FusedModulesHandle:
    """Undoes :func:`fuse_norm_activations`."""

    def __init__(self) -> None:
        self._modules: list[tuple[nn.Module, str]] = []

    @property
    def num_fused(self) -> int:
        """Norms that run their activation."""
        return sum(key == _PRODUCER for _, key in self._modules)

    def remove(self) -> None:
        """Give every module its class back. Calling it again does nothing."""
        while self._modules:
            restore_class(*self._modules.pop())


def fuse_norm_activations(links: Iterable[Link]) -> FusedModulesHandle:
    """Fuse each linked pair, by changing the classes of both.

    Args:
        links: Pairs that an observed step has proven; others than norms and activations named here are refused.

    Returns:
        The undo.

    Raises:
        ValueError: If a module is of another kind or cannot be changed. The modules are then as they were.
    """
    handle = FusedModulesHandle()
    handovers: dict[nn.Module, Handover] = {}
    try:
        for link in links:
            _check(link)
            if link.consumer not in handovers:
                handovers[link.consumer] = Handover()
                swap_class(link.consumer, _CONSUMER, handovers[link.consumer], _run_activation)
                handle._modules.append((link.consumer, _CONSUMER))
            activate = functools.partial(_plain_forward(link.consumer), link.consumer)
            swap_class(link.producer, _PRODUCER, _Producer(activate, handovers[link.consumer]), _run_norm)
            handle._modules.append((link.producer, _PRODUCER))
    except BaseException:
        handle.remove()
        raise
    return handle


def _plain_forward(activation: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
    """The forward below our class: hooks of the activation run when it is called, not here."""
    kinds = [kind for kind in type(activation).__mro__ if kind in FUSED_ACTIVATIONS]
    return kinds[0].forward


def _check(link: Link) -> None:
    if not isinstance(link.producer, FUSED_NORMS) or not isinstance(link.consumer, FUSED_ACTIVATIONS):
        names = f"{type(link.producer).__name__} and {type(link.consumer).__name__}"
        raise ValueError(f"{names} cannot be fused: it takes a norm and an activation that keeps its input.")


def _run_norm(norm: nn.Module, state: _Producer, plain: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    is_recorded = torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None
    if torch.compiler.is_compiling() or not is_recorded:
        return plain(input)
    module: Any = norm
    is_batch_norm = isinstance(norm, _BatchNorm)
    statistics = (module.running_mean, module.running_var) if is_batch_norm and not norm.training else (None, None)
    bias = getattr(norm, "bias", None)
    call = _Call(norm, state.activate, plain, _autocast_state(input.device.type))
    output: Tensor = _NormActivation.apply(  # type: ignore[no-untyped-call]
        call, input, module.weight, bias, *statistics
    )
    state.handover.give(output)
    return output


def _run_activation(
    activation: nn.Module, handover: Handover, plain: Callable[[Tensor], Tensor], input: Tensor
) -> Tensor:
    return input if handover.take(input) else plain(input)


def _autocast_state(device_type: str) -> dict[str, Any]:
    return {
        "device_type": device_type,
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
    }


@dataclass(frozen=True)
class _Call:
    """One call of a pair, and how to make it again."""

    norm: nn.Module
    activate: Callable[[Tensor], Tensor]
    plain_norm: Callable[[Tensor], Tensor]
    autocast: dict[str, Any]

    def first(self, input: Tensor) -> Tensor:
        return self.activate(self.plain_norm(input))

    def again(self, input: Tensor, weight: Tensor | None, bias: Tensor | None, *statistics: Tensor | None) -> Tensor:
        norm: Any = self.norm
        with torch.autocast(**self.autocast, cache_enabled=False):
            if isinstance(norm, nn.LayerNorm):
                output = F.layer_norm(input, norm.normalized_shape, weight, bias, norm.eps)
            elif isinstance(norm, nn.GroupNorm):
                output = F.group_norm(input, norm.num_groups, weight, bias, norm.eps)
            elif isinstance(norm, nn.RMSNorm):
                output = F.rms_norm(input, norm.normalized_shape, weight, norm.eps)
            else:
                output = self._batch_norm(input, weight, bias, *statistics)
            return self.activate(output)

    def _batch_norm(self, input: Tensor, weight: Tensor | None, bias: Tensor | None, *saved: Tensor | None) -> Tensor:
        norm: Any = self.norm
        mean, variance = saved
        is_training = mean is None or variance is None
        if is_training and norm.running_mean is not None:  # others to move: their dtype decides on the kernel
            mean, variance = torch.zeros_like(norm.running_mean), torch.ones_like(norm.running_var)
        return F.batch_norm(input, mean, variance, weight, bias, is_training, 0.0, norm.eps)


class _NormActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, call: _Call, input: Tensor, *others: Tensor | None) -> Tensor:
        ctx.call = call  # type: ignore[attr-defined]
        ctx.save_for_backward(input, *others)  # type: ignore[arg-type]
        return call.first(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        needs = ctx.needs_input_grad[1:4]
        is_differentiable = torch.is_grad_enabled()  # a graph of the backward is asked for
        tensors = list(ctx.saved_tensors)
        if not is_differentiable:
            tensors[:3] = [
                tensor.detach().requires_grad_(need) if tensor is not None else None
                for tensor, need in zip(tensors[:3], needs, strict=True)
            ]
        with torch.enable_grad():
            output = ctx.call.again(*tensors)
        wanted = [tensor for tensor, need in zip(tensors[:3], needs, strict=True) if need]
        grads = iter(torch.autograd.grad(output, wanted, grad, create_graph=is_differentiable))
        return None, *(next(grads) if need else None for need in needs), None, None
