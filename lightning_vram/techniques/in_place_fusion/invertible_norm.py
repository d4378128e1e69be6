"""Batch norm and an invertible activation as one function that saves only its output (InPlace-ABN).

The next layer saves the output anyway; the backward recovers ``y = act^-1(output)`` and ``xhat = (y - beta) / gamma``.
From https://arxiv.org/abs/1712.02616, which trains with ``|gamma| + eps``: here gamma is used as it is, and the output
is that of the original layers, by the same kernels. Costs the inverse in the backward, and accuracy: the rounding of
the output is divided by gamma.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_vram.private_names.dispatcher import batch_norm_and_statistics
from lightning_vram.private_names.torch import without_autocast

_aten = torch.ops.aten


@dataclass(frozen=True)
class InvertibleActivation:
    """LeakyReLU, ELU, or neither."""

    negative_slope: float = 1.0  # factor of what is below zero
    alpha: float | None = None  # of an ELU, which then takes the place of the slope

    def apply_(self, value: Tensor) -> Tensor:
        """Activate in place."""
        if self.alpha is not None:
            return F.elu(value, self.alpha, inplace=True)
        return value if self.negative_slope == 1 else F.leaky_relu(value, self.negative_slope, inplace=True)

    def invert(self, output: Tensor) -> Tensor:
        """Compute the input from the output; what an ELU has rounded to ``-alpha`` stays finite."""
        if self.alpha is None:
            # the inverse of a leaky ReLU is one
            return output if self.negative_slope == 1 else F.leaky_relu(output, 1 / self.negative_slope)
        lowest = torch.finfo(output.dtype).eps / 2 - 1
        below = output.clamp(max=0).div_(self.alpha).clamp_(min=lowest).log1p_()
        return below.add_(output.clamp(min=0))

    def differentiate(self, gradient: Tensor, output: Tensor) -> Tensor:
        """Compute the gradient of the input from that of the output."""
        result: Tensor = gradient
        if self.alpha is not None:
            result = _aten.elu_backward(gradient, self.alpha, 1, 1, is_result=True, self_or_result=output)
        elif self.negative_slope != 1:
            result = _aten.leaky_relu_backward(gradient, output, self.negative_slope, self_is_result=True)
        return result


def predict_inversion_error(
    weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, activation: InvertibleActivation
) -> Tensor:
    """Predict the error of the recovered ``xhat``, relative to its standard deviation of 1: ``[C]``, or ``[1]``.

    It is the relative error of gamma's gradient where the incoming gradient is noise. For ``y`` of mean beta and
    deviation gamma, rounded to ``dtype`` of unit roundoff u: ``u * sqrt(1 + (beta/gamma)^2)``, what the slope pushes
    below the smallest number of ``dtype``, and for an ELU ``u / gamma`` times the root mean square of ``exp(-y) - 1``
    below zero, for normal ``xhat``. Measured errors are a fifth of it to all of it. Not finite where gamma is zero.
    """
    weight, bias = (value.detach().float() if value is not None else value for value in (weight, bias))
    gamma = weight.abs() if weight is not None else torch.ones_like(bias if bias is not None else torch.ones(1))
    beta = bias if bias is not None else torch.zeros_like(gamma)
    kind = torch.finfo(dtype)
    roundoff = kind.eps / 2
    rounded = roundoff * (1 + (beta / gamma).square()).sqrt()
    lost = kind.smallest_normal * roundoff / activation.negative_slope / gamma
    error = rounded.square() + lost.square()
    if activation.alpha is not None:
        # the mean of (exp(-y) - 1)^2 over y < 0 for y ~ N(beta, gamma^2)
        twice, once, none = (_mean_exponential_below_zero(power, gamma, beta) for power in (2, 1, 0))
        error += (roundoff / gamma).square() * (twice - 2 * once + none).clamp(min=0)
    return error.sqrt()


def _mean_exponential_below_zero(power: int, gamma: Tensor, beta: Tensor) -> Tensor:
    """Mean of ``exp(-power * y)`` for y < 0 and of 0 above, of y ~ N(beta, gamma^2)."""
    share: Tensor = torch.special.ndtr((power * gamma.square() - beta) / gamma)
    return (power**2 * gamma.square() / 2 - power * beta).exp() * share


@dataclass(frozen=True)
class Normalization:
    """How a batch norm gets and updates its statistics."""

    running_mean: Tensor | None  # [C], updated in place if is_batch; None: not tracked
    running_var: Tensor | None
    is_batch: bool  # normalize by the statistics of the batch; else by the running ones
    momentum: float  # weight of the batch in the running statistics
    eps: float
    group: dist.ProcessGroup | None = None  # processes that share statistics; None: this process alone


def normalize_and_activate(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalization: Normalization,
    activation: InvertibleActivation,
) -> Tensor:
    """Compute ``activation(batch_norm(input))``, saving only the output for backward.

    The output must not be changed in place before the backward, nor the gradient be differentiated: autograd raises.
    ``input``: ``[N, C, ...]`` with more than one value per channel over all processes; ``weight``: nowhere zero.
    With a group, every process of it must call this, and run the backward, in the same order.

    Example:
        >>> import torch
        >>> frozen = Normalization(torch.zeros(3), torch.ones(3), is_batch=False, momentum=0.1, eps=1e-5)
        >>> x = torch.tensor([[-1.0, 0.0, 2.0]], requires_grad=True)
        >>> normalize_and_activate(x, None, None, frozen, InvertibleActivation(negative_slope=0.5))
        tensor([[-0.5000,  0.0000,  2.0000]], grad_fn=<_NormalizeAndActivateBackward>)
    """
    apply: Callable[..., tuple[Tensor, ...]] = _NormalizeAndActivate.apply
    return apply(input, weight, bias, normalization, activation)[0]


class _NormalizeAndActivate(torch.autograd.Function):
    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        normalization: Normalization,
        activation: InvertibleActivation,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        normalize: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = _normalize_frozen
        if normalization.is_batch:
            normalize = _normalize_batch if normalization.group is None else _normalize_shared
        output, inverse_deviation, count = normalize(input, weight, bias, normalization)
        return activation.apply_(output), inverse_deviation, count

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _, weight, bias, ctx.normalization, ctx.activation = inputs
        ctx.mark_non_differentiable(*(value for value in output[1:] if value is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, bias, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        weight, bias, output, inverse_deviation, count = ctx.saved_tensors
        with without_autocast():
            value = ctx.activation.invert(output)
            gradient = ctx.activation.differentiate(gradient, output)
            gamma = inverse_deviation.new_ones(output.shape[1]) if weight is None else weight.to(inverse_deviation)
            beta = torch.zeros_like(gamma) if bias is None else bias.to(inverse_deviation)
            recovered = _Recovered(value, gamma, beta, inverse_deviation, ctx.needs_input_grad[:3])
            if count is not None:
                gradients = _differentiate_shared(gradient, recovered, count, ctx.normalization.group)
            elif ctx.normalization.is_batch:
                # The kernel computes xhat = (input - mean) * inverse_deviation, and scales by weight *
                # inverse_deviation: given y, beta and 1/gamma, it gets xhat from y itself, without a copy.
                gradients = _call_kernel(gradient, recovered, gamma.square() * inverse_deviation, recovered.needs)
            else:
                gradients = _differentiate_frozen(gradient, recovered)
        of_input, of_weight, of_bias = gradients
        of_weight = of_weight.to(weight.dtype) if of_weight is not None and weight is not None else None
        of_bias = of_bias.to(bias.dtype) if of_bias is not None and bias is not None else None
        return of_input, of_weight, of_bias, None, None


# --- forward: output before the activation, 1 / deviation [C] in the dtype of accumulation, count of values or None ---


def _normalize_batch(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, how: Normalization
) -> tuple[Tensor, Tensor, None]:
    running = (how.running_mean, how.running_var)
    # What F.batch_norm is made of: it chooses cuDNN as F.batch_norm does, and returns the statistics too.
    implementation = torch.native_batch_norm
    if batch_norm_and_statistics is not None:
        implementation = functools.partial(batch_norm_and_statistics, cudnn_enabled=torch.backends.cudnn.enabled)
    output, _, inverse_deviation, *_ = implementation(
        input, weight, bias, *running, training=True, momentum=how.momentum, eps=how.eps
    )
    return output, inverse_deviation.to(_accumulation_dtype(input)), None


def _normalize_frozen(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, how: Normalization
) -> tuple[Tensor, Tensor, None]:
    assert how.running_var is not None
    output = F.batch_norm(input, how.running_mean, how.running_var, weight, bias, eps=how.eps)
    return output, (how.running_var.to(_accumulation_dtype(input)) + how.eps).rsqrt(), None


def _normalize_shared(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, how: Normalization
) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance, count = _gather_statistics(input, how.group)
    if how.running_mean is not None and how.running_var is not None:
        unbiased = variance * (count / (count - 1).clamp(min=1))
        how.running_mean.lerp_(mean.to(how.running_mean), how.momentum)
        how.running_var.lerp_(unbiased.to(how.running_var), how.momentum)
    gamma = weight.to(mean) if weight is not None else None
    beta = bias.to(mean) if bias is not None else None
    output = F.batch_norm(input, mean, variance, gamma, beta, eps=how.eps)
    return output, (variance + how.eps).rsqrt(), count


def _gather_statistics(input: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of values per channel, over the batches of all processes, some maybe empty."""
    dims = [dim for dim in range(input.dim()) if dim != 1]
    dtype = _accumulation_dtype(input)
    own = torch.zeros(2 * input.shape[1] + 1, dtype=dtype, device=input.device)
    if input.numel() > 0:
        variance, mean = torch.var_mean(input.to(dtype), dims, correction=0)
        own = torch.cat([mean, variance, own.new_full((1,), input.numel() // input.shape[1])])
    # Variances of the parts, not sums of squares, which cancel where the mean is large.
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group)
    gathered = torch.stack(parts)
    means, variances = gathered[:, :-1].chunk(2, dim=1)
    counts = gathered[:, -1:]
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    variance = ((variances + (means - mean).square()) * counts).sum(0) / count
    return mean, variance, count


# --- backward ---


@dataclass(frozen=True)
class _Recovered:
    value: Tensor  # y = gamma * xhat + beta
    gamma: Tensor
    beta: Tensor
    inverse_deviation: Tensor
    needs: tuple[bool, bool, bool]  # gradients of input, weight, bias


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _differentiate_frozen(gradient: Tensor, recovered: _Recovered) -> _Gradients:
    scale = recovered.gamma * recovered.inverse_deviation
    statistics = (recovered.beta, torch.ones_like(recovered.beta), None, None)  # running, of the batch
    of_input, of_weight, of_bias = _aten.native_batch_norm_backward(
        gradient, recovered.value, scale, *statistics, train=False, eps=0.0, output_mask=recovered.needs
    )
    return of_input, of_weight / recovered.gamma if recovered.needs[1] else None, of_bias


def _differentiate_shared(
    gradient: Tensor, recovered: _Recovered, count: Tensor, group: dist.ProcessGroup | None
) -> _Gradients:
    """Weight and bias get the gradient of this process's batch, as in SyncBatchNorm: DDP averages them."""
    _, of_weight, of_bias = _call_kernel(gradient, recovered, recovered.gamma, (False, True, True))
    assert of_weight is not None
    assert of_bias is not None
    if not recovered.needs[0]:
        return None, of_weight, of_bias
    sums = torch.stack([of_weight, of_bias])
    dist.all_reduce(sums, group=group)
    projection, mean = sums * recovered.inverse_deviation / count
    shape = [1, -1] + [1] * (gradient.dim() - 2)
    offset = recovered.beta * projection - recovered.gamma * mean
    scale = recovered.gamma * recovered.inverse_deviation
    of_input = torch.addcmul(offset.view(shape), recovered.value, projection.view(shape), value=-1)
    of_input.addcmul_(gradient, scale.view(shape))
    return of_input.to(gradient.dtype), of_weight, of_bias


def _call_kernel(gradient: Tensor, recovered: _Recovered, scale: Tensor, needs: tuple[bool, bool, bool]) -> _Gradients:
    if gradient.numel() == 0:
        nothing = torch.zeros_like(recovered.gamma)
        return torch.empty_like(gradient), nothing, nothing
    statistics = (None, None, recovered.beta, recovered.gamma.reciprocal())  # running, of the batch
    of_input, of_weight, of_bias = _aten.native_batch_norm_backward(
        gradient, recovered.value, scale, *statistics, train=True, eps=0.0, output_mask=needs
    )
    return of_input, of_weight, of_bias


def _accumulation_dtype(input: Tensor) -> torch.dtype:
    return torch.promote_types(input.dtype, torch.float32)
