"""What is kept beside 16-bit weights, by scheme, and how both make the fp32 weights that a step works on.

Every codec is told the weights anew at each step, so that what was written to them from outside (weights clamped or
loaded) is kept: zeros and NaNs as they are. A rest that is not the weight's own moves others by half a unit in the last
place of bf16 at most: so weights clamped to a number may lie beyond it by that.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_vram.core.tensors.bit_patterns import add_compensation_, compensate_, join_, round_randomly_, split_


class WeightCodec(ABC):
    """Keeps ``rest``: a flat tensor of as many elements as there are weights, or ``None``."""

    rest: Tensor | None = None

    @abstractmethod
    def read(self, weights: Tensor) -> Tensor:
        """Make exact weights of ``weights``: flat, fp32, what the bf16 weights hold now. May work in place."""

    @abstractmethod
    def write(self, exact: Tensor, generator: torch.Generator | None) -> Tensor:
        """Keep the rest of ``exact``: flat, fp32. Without a generator nothing is random. May work in place.

        Returns:
            What to copy to the bf16 weights: flat.
        """


class MasterCodec(WeightCodec):
    """An fp32 copy: 4 bytes per weight, exact."""

    def read(self, weights: Tensor) -> Tensor:
        """Where a weight is no longer the copy rounded, the weight is right: somebody wrote to it."""
        assert self.rest is not None
        return torch.where(weights == self.rest.bfloat16(), self.rest, weights, out=self.rest)

    def write(self, exact: Tensor, generator: torch.Generator | None) -> Tensor:
        """Keep all of it: what was read is this very tensor."""
        self.rest = exact
        return exact


class SplitCodec(WeightCodec):
    """The lower half of the fp32 pattern: 2 bytes per weight, exact.

    What is computed with is the conversion to bf16 but for one weight of 131072, which is a half between two: see
    :func:`~lightning_vram.core.tensors.bit_patterns.split_`.
    """

    def read(self, weights: Tensor) -> Tensor:
        """Join both halves."""
        assert self.rest is not None
        join_(weights, self.rest)
        return weights

    def write(self, exact: Tensor, generator: torch.Generator | None) -> Tensor:
        """Keep the lower halves."""
        if self.rest is None:
            self.rest = torch.empty_like(exact, dtype=torch.int16)
        split_(exact, self.rest)
        return exact


class KahanCodec(WeightCodec):
    """What rounding took, rounded itself: 2 bytes per weight, 16 significant bits together."""

    def read(self, weights: Tensor) -> Tensor:
        """Add both."""
        assert self.rest is not None
        add_compensation_(weights, self.rest)
        return weights

    def write(self, exact: Tensor, generator: torch.Generator | None) -> Tensor:
        """Keep the compensation."""
        if self.rest is None:
            self.rest = torch.empty_like(exact, dtype=torch.bfloat16)
        return compensate_(exact, self.rest)


class StochasticCodec(WeightCodec):
    """Nothing: the weights are rounded at random."""

    def read(self, weights: Tensor) -> Tensor:
        """There is no more to know."""
        return weights

    def write(self, exact: Tensor, generator: torch.Generator | None) -> Tensor:
        """Round; without a generator the copy to bf16 does, to the nearest."""
        if generator is not None:
            round_randomly_(exact, generator)
        return exact


CODECS: dict[str, type[WeightCodec]] = {
    "bf16+master": MasterCodec,
    "bf16+split": SplitCodec,
    "bf16+kahan": KahanCodec,
    "bf16+stochastic": StochasticCodec,
}
