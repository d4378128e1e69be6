"""Make the result of a batch norm again: to the bit, and without moving its running statistics a second time.

Two ways. The same kernel again, with other running statistics to move: the same bits by construction, one more
reduction. Or one elementwise pass from the statistics that are kept anyway: a third of the time, and the same bits only
where the kernel rounds as the formula does. That is tried once per process, dtype, device and layout on a million
random numbers, and taken only if all of them agree. A few at a time: it is tried in the middle of a backward.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.private_names.torch.dispatch import FakeTensor, without_dispatch
from lightning_vram.private_names.torch.operators import BATCH_NORM, BATCH_NORM_WITHOUT_STATISTICS
from lightning_vram.techniques.in_place_fusion.recomputation.recipes import Recipe, Value

aten = torch.ops.aten
_TRAINING = 5  # position of ``training`` among the arguments of all batch norms, except ``no_stats``
_NUM_TRIED = 1_000_000
# By dimensions. Channels and places fill vectors of the host, and a rest of one.
_TRIED_AT_ONCE = {2: [20, 109], 3: [2, 29, 37], 4: [2, 29, 3, 13], 5: [2, 29, 2, 3, 7]}


class BatchNormRecipe(Recipe):
    """One call of a batch norm, in training or evaluation."""

    __slots__ = ("running", "statistics")

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, inputs: list[Value]
    ) -> None:
        super().__init__(function, args, kwargs, inputs)
        self.statistics: tuple[Tensor, Tensor] | None = None
        """Mean and inverse deviation ``[C]``, as the kernel returned them: the backward keeps them as well."""
        self.running: tuple[torch.Size, torch.dtype, torch.device] | None = None
        """Of others to move: whether there are any, and of which dtype, decides how the kernel rounds."""

    @override
    def run(self, args: list[Any]) -> Any:
        x, weight, bias = args[0], args[1], args[2]
        if (
            self.statistics is not None
            and (type(x) is Tensor or (type(x) is FakeTensor and x.is_cpu))  # no kernel of a card can be tried
            and _formula_is_exact(_kernel_of(self.function, x, weight, bias))
        ):
            return (_normalise(x, weight, bias, *self.statistics),)
        if self.running is not None:
            shape, dtype, device = self.running
            args[3], args[4] = (torch.ones(shape, dtype=dtype, device=device) for _ in range(2))
        return self.function(*args, **self.kwargs) if self.kwargs else self.function(*args)


def second_run(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return operator and arguments of the second run: in training it must not move its buffers again."""
    if function is not BATCH_NORM_WITHOUT_STATISTICS and args[_TRAINING]:
        args = (*args[:3], None, None, *args[5:])
    return (aten.native_batch_norm.default if function is BATCH_NORM else function), args


def is_training(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether the call normalises by the statistics of its batch."""
    return function is BATCH_NORM_WITHOUT_STATISTICS or bool(args[_TRAINING])


def _normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, deviation: Tensor) -> Tensor:
    """Scale and shift ``x`` ``[N, C, ...]`` with fused multiply-adds, as the kernel of the host does."""
    scale = deviation * weight if weight is not None else deviation
    shift = torch.addcmul(bias, mean, scale, value=-1) if bias is not None else -mean * scale
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return torch.addcmul(shift.view(shape), x, scale.view(shape))


class _Kernel(NamedTuple):
    """All that decides how a kernel rounds."""

    function: Any
    device: torch.device
    dim: int
    is_contiguous: bool
    is_channels_last: bool
    dtypes: tuple[torch.dtype | None, ...]
    """Of input, weight and bias."""


def _kernel_of(function: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> _Kernel:
    dtypes = (x.dtype, *(parameter.dtype if parameter is not None else None for parameter in (weight, bias)))
    is_channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return _Kernel(function, x.device, x.dim(), x.is_contiguous(), is_channels_last, dtypes)


@cache
def _formula_is_exact(kernel: _Kernel) -> bool:
    """Whether :func:`_normalise` gives the bits of the kernel, tried on a million random numbers."""
    dtype, shape = kernel.dtypes[0], _TRIED_AT_ONCE.get(kernel.dim)
    is_known = dtype in (torch.float32, torch.float64) and set(kernel.dtypes) <= {dtype, None}
    if shape is None or not is_known or not (kernel.is_contiguous or kernel.is_channels_last):
        return False
    if kernel.device.type == "meta":
        return True
    with without_dispatch():  # on real tensors, and seen by nobody: it is tried once per process
        generator = torch.Generator(kernel.device).manual_seed(0)
        num_tries = -(-_NUM_TRIED // math.prod(shape))
        return all(_is_exact_once(kernel, shape, generator) for _ in range(num_tries))


def _is_exact_once(kernel: _Kernel, shape: list[int], generator: torch.Generator) -> bool:
    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=kernel.dtypes[0], device=kernel.device)

    x = random(*shape).mul_(3).add_(1)
    if not kernel.is_contiguous:
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (random(shape[1]) if kernel.dtypes[index] is not None else None for index in (1, 2))
    training, momentum, eps = True, 0.1, 1e-5
    result, mean, deviation = kernel.function(x, weight, bias, None, None, training, momentum, eps)[:3]
    ours = _normalise(x, weight, bias, mean, deviation)
    return ours.stride() == result.stride() and torch.equal(ours, result)
