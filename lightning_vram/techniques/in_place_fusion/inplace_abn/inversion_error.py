"""Predict how well the backward of an in-place activated batch norm recovers the norm's input.

``function.py`` keeps the output alone, and goes back from it through the activation and
gamma. The output is rounded, and the way back enlarges the rounding: the more, the smaller gamma is beside beta. This
says by how much, before anything is trained. It costs a few operators on ``[C]`` values. It does not know the data:
``xhat`` is taken to be normal.
"""

import torch
from torch import Tensor

from lightning_vram.techniques.in_place_fusion.inplace_abn.function import InvertibleActivation


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
