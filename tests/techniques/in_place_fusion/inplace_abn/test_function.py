"""Norm and activation from the output alone: the forward is the plain one to the bit, the gradient a recovered one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_vram.techniques.in_place_fusion.policy import measure_inversion_error, normalize_and_activate

C = 5
ACTIVATIONS = {"leaky": nn.LeakyReLU(0.01), "elu": nn.ELU(0.7)}
SHAPES = {"1d": (9, C), "2d": (4, C, 6, 6), "3d": (3, C, 4, 3, 3)}


class Case:
    """One norm with its input; ``ours`` and ``plain`` return output, gradients and running statistics."""

    def __init__(self, activation: str, shape: str = "2d", dtype: torch.dtype = torch.float64, **kwargs) -> None:
        torch.manual_seed(0)
        self.activation = ACTIVATIONS[activation]
        parameters = kwargs.get("parameters", dtype)
        self.x = (torch.randn(SHAPES[shape]) + 0.3).to(dtype)
        self.gradient = torch.randn_like(self.x)
        self.weight = torch.tensor([1.2, -0.7, 0.5, -1.0, 0.9]).to(parameters) if kwargs.get("affine", True) else None
        self.bias = torch.tensor([0.3, -0.6, 0.0, 0.8, -0.2]).to(parameters) if kwargs.get("affine", True) else None
        self.running = (torch.randn(C).to(parameters), (torch.rand(C) + 0.5).to(parameters))

    def ours(self) -> tuple[Tensor, ...]:
        inputs = self._inputs(self.x.dtype)
        output = normalize_and_activate(inputs[0], norm := self.norm(*inputs[1:]), self.activation)
        return self._results(output, inputs, self.gradient, norm.running_mean, norm.running_var)

    def norm(self, weight: Tensor | None, bias: Tensor | None) -> nn.Module:
        """A batch norm of these parameters, which are leaves already."""
        norm = nn.BatchNorm2d(C, affine=False)
        norm.running_mean, norm.running_var = (value.clone() for value in self.running)
        del norm.weight, norm.bias
        norm.weight, norm.bias = weight, bias
        return norm

    def plain(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        mean, variance = (value.clone() if dtype is None else value.to(dtype) for value in self.running)
        inputs = self._inputs(dtype)
        x, weight, bias = inputs
        output = self.activation(F.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5))
        return self._results(output, inputs, self.gradient.to(x.dtype), mean, variance)

    def _inputs(self, dtype: torch.dtype | None) -> list[Tensor | None]:
        """Leaves: the input in ``dtype``, the parameters as they are, or all in float64 for the reference."""
        kind = torch.float64 if dtype == torch.float64 else None
        values = (self.x, self.weight, self.bias)
        return [v.detach().to(kind or v.dtype).clone().requires_grad_() if v is not None else None for v in values]

    def _results(self, output, inputs, gradient, mean, variance) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(output, [value for value in inputs if value is not None], gradient)
        return output.detach(), mean, variance, *gradients


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_output_and_running_statistics_are_the_plain_ones_to_the_bit(activation, dtype):
    case = Case(activation, dtype=dtype)
    for actual, expected in zip(case.ours()[:3], case.plain()[:3], strict=True):
        assert torch.equal(actual, expected)
        assert actual.dtype == expected.dtype


@pytest.mark.parametrize(
    ("activation", "shape", "affine"), [("leaky", "1d", True), ("leaky", "2d", False), ("elu", "3d", True)]
)
def test_gradients_are_those_of_the_plain_layers(activation, shape, affine):
    case = Case(activation, shape, affine=affine)
    ours, plain = case.ours()[3:], case.plain()[3:]
    assert len(ours) == (3 if affine else 1)
    for actual, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "parameters", "allowance"),
    # Measured beyond the plain layers' own error: 1.4e-7, 1.7e-3, 1.9e-3 (torch 2.11: 3.1e-3), 1.7e-4. The inverse is
    # of an output that is rounded to 2**-8 = 3.9e-3.
    [
        (torch.float32, torch.float32, 2e-7),
        (torch.bfloat16, torch.bfloat16, 3e-3),
        (torch.bfloat16, torch.float32, 2**-8),
        (torch.float16, torch.float16, 3e-4),
    ],
    ids=str,
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_about_as_far_from_float64_as_the_plain_ones(activation, dtype, parameters, allowance):
    case = Case(activation, dtype=dtype, parameters=parameters)
    ours, exact, plain = case.ours()[3:], case.plain(torch.float64)[3:], case.plain()[3:]
    for actual, expected, usual in zip(ours, exact, plain, strict=True):
        assert actual.dtype == usual.dtype
        assert relative_error(actual, expected) < relative_error(usual, expected) + allowance


def test_an_elu_that_has_saturated_gives_a_finite_gradient():
    x = torch.tensor([1.0, -1.0] * 4).unsqueeze(1).requires_grad_()
    norm = nn.BatchNorm1d(1, eps=1e-30)
    nn.init.constant_(norm.weight, 30.0)
    output = normalize_and_activate(x, norm, nn.ELU())
    assert (output == -1).sum() == 4
    output.sum().backward()
    assert x.grad.isfinite().all()
    assert norm.weight.grad.item() == 4.0


def test_a_second_derivative_is_refused():
    case = Case("leaky")
    x = case.x.requires_grad_()
    output = normalize_and_activate(x, case.norm(case.weight, case.bias), case.activation)
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    message = "^trying to differentiate twice a function that was marked with @once_differentiable$"
    with pytest.raises(RuntimeError, match=message):
        gradient.sum().backward()


def test_an_output_changed_in_place_is_noticed():
    case = Case("leaky")
    output = normalize_and_activate(case.x.requires_grad_(), case.norm(case.weight, case.bias), case.activation)
    output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# --- the error of the inverse ---


def test_the_error_grows_with_beta_over_gamma_and_nothing_comes_back_through_a_gamma_of_zero():
    leaky = nn.LeakyReLU(0.01)
    weight, bias = torch.tensor([1.0, 0.1, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    error = measure_inversion_error(weight, bias, torch.bfloat16, leaky)
    # Numbers around 1 are rounded by at most 2**-8 or 2**-9, evenly, so by a root mean square of 2**-8.5 / sqrt(3).
    assert error[1].item() == pytest.approx(10 * 2**-8.5 / 3**0.5, rel=0.2)
    assert error[0] < error[1] / 5
    assert not error[2] <= 1
    assert measure_inversion_error(None, None, torch.float16, leaky).shape == (1,)
    tiny = nn.LeakyReLU(1e-4)  # pushes y below the smallest normal number of float16
    assert measure_inversion_error(None, None, torch.float16, tiny) > measure_inversion_error(
        None, None, torch.float16, leaky
    )
