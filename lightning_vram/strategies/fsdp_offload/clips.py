"""Clipping, by whatever plugin clips, on the local parts of gradients."""

from collections.abc import Callable

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_vram.core.gradients.clipping import clip_sharded_values
from lightning_vram.core.surgery.shadow import Shadow, instead
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.optimizers.stepping import iterate_parameters


class ShardedClips:
    """Stands in for the two ways a precision plugin clips, until :meth:`remove`.

    Those of PyTorch go through the dispatch of ``DTensor``, which takes longer than the arithmetic.

    Args:
        precision: The plugin.
        optimizers: Of the run.
        may_wait: Asked whether gradients may be scaled when the step is made.
    """

    def __init__(self, precision: Precision, optimizers: HostOptimizers, may_wait: Callable[[], bool]) -> None:
        self._optimizers = optimizers
        self._may_wait = may_wait
        self._shadows = [
            Shadow(precision, "clip_grad_by_norm", instead(self._clip_norm)),
            Shadow(precision, "clip_grad_by_value", instead(self._clip_value)),
        ]

    def remove(self) -> None:
        """Let the plugin clip by itself again."""
        for shadow in self._shadows:
            shadow.remove()

    def _clip_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._optimizers.clip_norm(optimizer, clip_val, may_wait=self._may_wait())

    def _clip_value(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_sharded_values(iterate_parameters(optimizer), clip_val)
