"""Batch norms that see one batch in several parts move their running statistics as if they saw it once."""

import torch
from torch import Tensor, nn

from lightning_vram.core.batches.norm_momentum import NormMomentum
from lightning_vram.private_names.torch.modules import NormBase


class NormCounting:
    """One batch in parts: each moves the running statistics by its share, and all of them count as one batch.

    With momentum m the statistics s become (1 - m) s + m x. A part with share w does so with 1 - (1 - m)^w: together
    they forget as much of s as the whole batch would. The normalisation itself still sees one part at a time.
    """

    def __init__(self, module: nn.Module) -> None:
        self._momentum = NormMomentum(module)
        self._counts: list[tuple[Tensor, Tensor]] = [
            (norm.num_batches_tracked, norm.num_batches_tracked.clone())
            for norm in module.modules()
            # A cumulative average (momentum=None) takes its factor from this count, and every part counts.
            if isinstance(norm, NormBase) and norm.num_batches_tracked is not None and norm.momentum is not None
        ]

    def begin_part(self, share: float) -> None:
        """The next part has this share of the samples."""
        self._momentum.scale(share)

    def finish(self) -> None:
        """All parts ran."""
        self.restore()
        with torch.no_grad():
            for count, before in self._counts:
                count.copy_(torch.where(count > before, before + 1, before))

    def restore(self) -> None:
        """Put the momentum back."""
        self._momentum.restore()
