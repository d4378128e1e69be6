"""Invert the activation behind a batch norm, and predict how well the norm's input is recovered by it.

``function.py`` keeps the output alone, and goes back from it through the activation and gamma. The output is rounded,
and the way back enlarges the rounding: the more, the smaller gamma is beside beta. What is predicted here, before
anything is trained, costs a few operators on ``[C]`` values and does not know the data: ``xhat`` is taken to be normal.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class InvertibleActivation:
    """LeakyReLU, ELU, or neither.

    Args:
        negative_slope: Factor of what is below zero; 1 leaves it as it is.
        alpha: Of an ELU, which then takes the place of the slope. ``None``: no ELU.
    """

    negative_slope: float = 1.0
    alpha: float | None = None

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
    """Predict the error of the recovered ``xhat``, relative to its standard deviation of 1, per channel.

    It is what the gradient of gamma gets as relative error where the incoming gradient is noise, and more than that
    where it is not. For ``y`` of mean beta and deviation gamma, rounded to ``dtype`` of unit roundoff u:
    ``u * sqrt(1 + (beta/gamma)^2)``, what the slope pushes below the smallest number of ``dtype``, and for an ELU
    ``u / gamma`` times the root mean square of ``exp(-y) - 1`` below zero. Measured errors of ``xhat`` are between a
    fifth of it and all of it. What any norm's gradient loses to rounding comes on top.

    Args:
        weight: Gamma, ``[C]``. ``None``: one.
        bias: Beta, ``[C]``. ``None``: zero.
        dtype: Of the output.
        activation: What was applied to the norm's result.

    Returns:
        ``[C]`` in float32 (``[1]`` if there is neither weight nor bias); not finite where gamma is zero.

    Raises:
        TypeError: If ``dtype`` is not a floating point type.
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
