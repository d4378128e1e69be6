"""Make dropout again: from its mask kept as bits, or from the state its generator had.

A mask as bits is a thirty-second of the bytes that dropout keeps on the host, an eighth on a GPU. The state of the
generator is a few bytes on a GPU and 5 KB on the host, whatever the size of the mask, and drawing it again costs more
time than reading bits.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.core.random_state.sources import Source, default_source
from lightning_vram.private_names.torch.autograd import outside_of_vmap
from lightning_vram.techniques.in_place_fusion.recomputation.recipes import Recipe, Value

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

    __slots__ = ("_device", "_dtype", "_generator", "_probability", "_shape", "_source", "_state", "_strides")

    def __init__(
        self, function: Any, like: Tensor, probability: float, generator: torch.Generator | None, source: Source
    ) -> None:
        super().__init__(function, (), None, [])
        self._generator, self._source = generator, source
        self._state = source[0]()
        self._probability = probability
        self._shape, self._strides = like.shape, like.stride()
        self._dtype, self._device = like.dtype, like.device

    @override
    def run(self, args: list[Any]) -> Any:
        with outside_of_vmap():  # a batched backward draws what the forward drew
            return self._draw()

    def _draw(self) -> Any:
        like = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._device)
        read, write = self._source
        now = read()
        write(self._state)
        try:
            if self.function is aten.bernoulli_.float:
                return like.bernoulli_(self._probability, generator=self._generator)
            return self.function(like, p=self._probability, train=True)
        finally:
            write(now)


def note_draw(
    function: Any, like: Tensor, probability: float, generator: torch.Generator | None = None
) -> DrawRecipe | None:
    """Return how to draw again the mask, made like ``like``, that ``function`` is about to draw.

    ``None`` where the device has no generator that can be set.
    """
    source = (generator.get_state, generator.set_state) if generator is not None else default_source(like.device)
    return DrawRecipe(function, like, probability, generator, source) if source is not None else None


def _scale(probability: float, like: Tensor) -> float:
    """What the kernels scale by: rounded to the dtype on the host, to float32 on a GPU."""
    if probability >= 1:
        return 0.0
    if like.dtype is torch.float64:
        return 1 / (1 - probability)
    if like.device.type == "cpu":
        return float(torch.tensor(1 / (1 - probability), dtype=like.dtype))
    return float(1 / torch.tensor(1 - probability, dtype=torch.float32))
