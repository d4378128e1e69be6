"""Make dropout again: from its mask kept as bits, or from the state its generator had.

A mask as bits is a thirty-second of the bytes that dropout keeps on the host, an eighth on a GPU. The state of the
generator is a few bytes on a GPU and 5 KB on the host, whatever the size of the mask, and drawing it again costs more
time than reading bits.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.private_names.autograd import outside_of_vmap
from lightning_vram.techniques.recipes import Recipe, Value

aten = torch.ops.aten


class DropoutRecipe(Recipe):
    """The first result of ``native_dropout``: the input times the mask times the scale."""

    __slots__ = ()

    def __init__(self, source: Value, mask: Value, probability: float) -> None:
        super().__init__(aten.native_dropout.default, (source, mask, probability), None, [source, mask])

    @override
    def run(self, args: list[Any]) -> Tensor:
        source, mask, probability = args
        result: Tensor = source * mask * _scale(probability, source)
        return result


class DrawRecipe(Recipe):
    """A mask, drawn again from the state its generator had."""

    __slots__ = ("_device", "_dtype", "_generator", "_probability", "_shape", "_state", "_strides")

    def __init__(self, function: Any, like: Tensor, probability: float, generator: torch.Generator | None) -> None:
        super().__init__(function, (), None, [])
        self._generator = generator if generator is not None else default_generator(like.device)
        self._state = self._generator.get_state()
        self._probability = probability
        self._shape, self._strides = like.shape, like.stride()
        self._dtype, self._device = like.dtype, like.device

    @override
    def run(self, args: list[Any]) -> Any:
        with outside_of_vmap():  # a batched backward draws what the forward drew
            return self._draw()

    def _draw(self) -> Any:
        like = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._device)
        now = self._generator.get_state()
        self._generator.set_state(self._state)
        try:
            if self.function is aten.bernoulli_.float:
                return like.bernoulli_(self._probability, generator=self._generator)
            return self.function(like, p=self._probability, train=True)
        finally:
            self._generator.set_state(now)


def _scale(probability: float, like: Tensor) -> float:
    """What the kernels scale by: rounded to the dtype on the host, to float32 on a GPU."""
    if probability >= 1:
        return 0.0
    if like.dtype is torch.float64:
        return 1 / (1 - probability)
    if like.device.type == "cpu":
        return float(torch.tensor(1 / (1 - probability), dtype=like.dtype))
    return float(1 / torch.tensor(1 - probability, dtype=torch.float32))


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operators on ``device`` draw from."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()  # type: ignore[redundant-expr]
        return torch.cuda.default_generators[index]
    return torch.default_generator
