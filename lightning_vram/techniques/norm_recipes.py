"""Make the result of a batch norm again: to the bit, and without moving its running statistics a second time.

Two ways. The same kernel again, with no running statistics given: the same bits by construction, one more reduction.
Or one elementwise pass from the statistics that are kept anyway: a third of the time, and the same bits only where
the kernel rounds as the formula does. That is tried once per process, dtype, device and layout on a million random
numbers, and taken only if all of them agree.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.techniques.recipes import Recipe, Value

aten = torch.ops.aten
_TRAINING = 5  # position of ``training`` among the arguments of all batch norms, except ``no_stats``


class BatchNormRecipe(Recipe):
    """One call of a batch norm, in training or evaluation."""

    __slots__ = ("_statistics",)

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, inputs: list[Value]
    ) -> None:
        super().__init__(function, args, kwargs, inputs)
        self._statistics: tuple[Tensor, Tensor] | None = None

    def keep_statistics(self, result: tuple[Tensor, ...]) -> None:
        """Take mean and inverse deviation ``[C]`` from what the kernel returned: the backward keeps them as well."""
        self._statistics = (result[1], result[2])

    @override
    def run(self, args: list[Any]) -> Any:
        x, weight, bias = args[0], args[1], args[2]
        if self._statistics is not None and _formula_is_exact(*_kernel_key(self.function, x, weight, bias)):
            return (_normalise(x, weight, bias, *self._statistics),)
        return self.function(*args, **self.kwargs) if self.kwargs else self.function(*args)


def without_running_statistics(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments for the second run of a batch norm: in training it must not move its buffers again."""
    if function is aten._native_batch_norm_legit.no_stats or not args[_TRAINING]:
        return args
    return (*args[:3], None, None, *args[5:])


def second_run(function: Any) -> Any:
    """Return the operator for the second run: one that takes calls without running statistics."""
    return aten.native_batch_norm.default if function is aten._native_batch_norm_legit.default else function


def is_training(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether the call normalises by the statistics of its batch."""
    return function is aten._native_batch_norm_legit.no_stats or bool(args[_TRAINING])


def _normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, deviation: Tensor) -> Tensor:
    """Scale and shift ``x`` ``[N, C, ...]`` with fused multiply-adds, as the kernel of the host does."""
    scale = deviation * weight if weight is not None else deviation
    shift = torch.addcmul(bias, mean, scale, value=-1) if bias is not None else -mean * scale
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return torch.addcmul(shift.view(shape), x, scale.view(shape))


def _kernel_key(function: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Any, ...]:
    dtypes = (x.dtype, *(parameter.dtype if parameter is not None else None for parameter in (weight, bias)))
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return function, x.device, x.dim(), channels_last, x.is_contiguous(), *dtypes


@cache
def _formula_is_exact(
    function: Any,
    device: torch.device,
    dim: int,
    channels_last: bool,
    contiguous: bool,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> bool:
    """Whether :func:`_normalise` gives the bits of the kernel, tried on a million random numbers."""
    is_uniform = {weight_dtype, bias_dtype} <= {dtype, None}
    if not is_uniform or dtype not in (torch.float32, torch.float64) or not (contiguous or channels_last):
        return False
    if device.type == "meta":
        return True
    generator = torch.Generator(device).manual_seed(0)
    shape = {2: [8192, 128], 3: [64, 61, 263], 4: [16, 61, 31, 37], 5: [4, 29, 19, 21, 23]}.get(dim)
    if shape is None:
        return False

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=dtype, device=device)

    x = random(*shape) * 3 + 1
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    weight = random(shape[1]) if weight_dtype is not None else None
    bias = random(shape[1]) if bias_dtype is not None else None
    result, mean, deviation = function(x, weight, bias, None, None, True, 0.1, 1e-5)[:3]
    ours = _normalise(x, weight, bias, mean, deviation)
    return ours.stride() == result.stride() and torch.equal(ours, result)
