"""Batch norm and an invertible activation as one function that saves only its output (InPlace-ABN).

The next layer saves the output anyway; the backward recovers ``y = act^-1(output)`` and ``xhat = (y - beta) / gamma``.
From https://arxiv.org/abs/1712.02616, which trains with ``|gamma| + eps``: here gamma is used as it is, and the output
is that of the original layers, by the same kernels. Costs the inverse in the backward, and accuracy: the rounding of
the output is divided by gamma.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_vram.private_names.dispatcher import batch_norm_and_statistics
from lightning_vram.private_names.torch import without_autocast

_aten = torch.ops.aten
_NUM_QUANTILES = 101


@dataclass(frozen=True)
class InvertibleActivation:
    """LeakyReLU or ELU."""

    negative_slope: float = 1.0  # factor of what is below zero
    alpha: float | None = None  # of an ELU, which then takes the place of the slope

    def apply_(self, value: Tensor) -> Tensor:
        """Activate in place."""
        if self.alpha is not None:
            return F.elu(value, self.alpha, inplace=True)
        return F.leaky_relu(value, self.negative_slope, inplace=True)

    def invert(self, output: Tensor) -> Tensor:
        """Compute the input from the output; what an ELU has rounded to ``-alpha`` stays finite."""
        if self.alpha is None:
            return F.leaky_relu(output, 1 / self.negative_slope)  # the inverse of a leaky ReLU is one
        lowest = torch.finfo(output.dtype).eps / 2 - 1
        below = output.clamp(max=0).div_(self.alpha).clamp_(min=lowest).log1p_()
        return below.add_(output.clamp(min=0))

    def differentiate(self, gradient: Tensor, output: Tensor) -> Tensor:
        """Compute the gradient of the input from that of the output."""
        if self.alpha is not None:
            result: Tensor = _aten.elu_backward(gradient, self.alpha, 1, 1, is_result=True, self_or_result=output)
        else:
            result = _aten.leaky_relu_backward(gradient, output, self.negative_slope, self_is_result=True)
        return result


def measure_inversion_error(
    weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, activation: InvertibleActivation
) -> Tensor:
    """Measure the error of the recovered ``xhat``, relative to its standard deviation of 1, per channel: ``[C]``.

    It is the root mean square over quantiles of the normal distribution, rounded to ``dtype`` and inverted, and about
    the relative error of gamma's gradient where the incoming gradient is noise. Not finite where gamma is zero.
    """
    shape = next((value for value in (weight, bias) if value is not None), torch.empty(1))
    gamma = (weight if weight is not None else torch.ones_like(shape)).detach().double().unsqueeze(1)
    beta = (bias if bias is not None else torch.zeros_like(shape)).detach().double().unsqueeze(1)
    shares = torch.arange(1, 2 * _NUM_QUANTILES, 2, dtype=torch.float64, device=gamma.device) / (2 * _NUM_QUANTILES)
    xhat = torch.special.ndtri(shares)
    output = activation.apply_((gamma * xhat + beta).to(dtype))
    recovered = (activation.invert(output) - beta) / gamma
    error: Tensor = (recovered - xhat).square().mean(1).sqrt()
    return error


@dataclass(frozen=True)
class Normalization:
    """How a batch norm in training updates its statistics."""

    running_mean: Tensor | None  # [C], updated in place; None: not tracked
    running_var: Tensor | None
    momentum: float  # weight of the batch in the running statistics
    eps: float


def normalize_and_activate(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalization: Normalization,
    activation: InvertibleActivation,
) -> Tensor:
    """Compute ``activation(batch_norm(input))``, saving only the output for backward.

    The output must not be changed in place before the backward, nor the gradient be differentiated: autograd raises.
    ``input``: ``[N, C, ...]`` with more than one value per channel; ``weight``: nowhere zero.

    Example:
        >>> import torch
        >>> how = Normalization(None, None, momentum=0.1, eps=0.0)
        >>> x = torch.tensor([[-1.0, 0.0], [3.0, 2.0]], requires_grad=True)
        >>> normalize_and_activate(x, None, None, how, InvertibleActivation(negative_slope=0.5))
        tensor([[-0.5000, -0.5000],
                [ 1.0000,  1.0000]], grad_fn=<_NormalizeAndActivateBackward>)
    """
    output: Tensor = _NormalizeAndActivate.apply(input, weight, bias, normalization, activation)[0]  # type: ignore[no-untyped-call]
    return output


class _NormalizeAndActivate(torch.autograd.Function):
    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        normalization: Normalization,
        activation: InvertibleActivation,
    ) -> tuple[Tensor, Tensor]:
        # What F.batch_norm is made of: it chooses cuDNN as F.batch_norm does, and returns the statistics too.
        implementation = torch.native_batch_norm
        if batch_norm_and_statistics is not None:
            implementation = functools.partial(batch_norm_and_statistics, cudnn_enabled=torch.backends.cudnn.enabled)
        running = (normalization.running_mean, normalization.running_var)
        output, _, inverse_deviation, *_ = implementation(
            input, weight, bias, *running, training=True, momentum=normalization.momentum, eps=normalization.eps
        )
        inverse_deviation = inverse_deviation.to(torch.promote_types(input.dtype, torch.float32))
        return activation.apply_(output), inverse_deviation

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, weight, bias, _, ctx.activation = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, bias, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        weight, bias, output, inverse_deviation = ctx.saved_tensors
        with without_autocast():
            value = ctx.activation.invert(output)  # y = gamma * xhat + beta
            gradient = ctx.activation.differentiate(gradient, output)
            gamma = inverse_deviation.new_ones(output.shape[1]) if weight is None else weight.to(inverse_deviation)
            beta = torch.zeros_like(gamma) if bias is None else bias.to(inverse_deviation)
            # The kernel computes xhat = (input - mean) * inverse_deviation, and scales by weight * inverse_deviation:
            # given y, beta and 1/gamma, it gets xhat from y itself, without a copy.
            statistics = (None, None, beta, gamma.reciprocal())  # running, of the batch
            scale = gamma.square() * inverse_deviation
            needs = ctx.needs_input_grad[:3]
            of_input, of_weight, of_bias = _aten.native_batch_norm_backward(
                gradient, value, scale, *statistics, train=True, eps=0.0, output_mask=needs
            )
        of_weight = of_weight.to(weight.dtype) if of_weight is not None and weight is not None else None
        of_bias = of_bias.to(bias.dtype) if of_bias is not None and bias is not None else None
        return of_input, of_weight, of_bias, None, None
