import pytest
import torch

from lightning_vram.core.gradients import clip_gradient_norm


def parameters(*dtypes):
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(40, 50).to(dtype)) for dtype in dtypes]
    for parameter in made:
        parameter.grad = torch.randn(40, 50).to(parameter.dtype)
    return made


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.complex64), (torch.float64, torch.float32)])
def test_wide_gradients_are_clipped_as_by_torch(dtypes, max_norm):
    ours, theirs = parameters(*dtypes), parameters(*dtypes)
    norm = clip_gradient_norm(ours, max_norm)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm), check_dtype=False)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_clipped_by_a_norm_in_fp32(dtype):
    ours = parameters(dtype, torch.float32)
    exact = torch.cat([parameter.grad.double().flatten() for parameter in ours])
    norm = clip_gradient_norm(ours, 10.0)
    assert norm.item() == pytest.approx(exact.norm().item(), rel=1e-6)
    expected = (exact * 10.0 / (exact.norm() + 1e-6)).split(2000)
    rtol = 0.51 * torch.finfo(dtype).eps  # half a unit in the last place
    torch.testing.assert_close(ours[0].grad.flatten().double(), expected[0], rtol=rtol, atol=1e-7)
    torch.testing.assert_close(ours[1].grad.flatten(), expected[1].float())


def test_without_gradients_the_norm_is_zero():
    assert clip_gradient_norm([torch.nn.Parameter(torch.ones(2))], 1.0) == 0
