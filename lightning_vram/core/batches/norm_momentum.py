"""Keep running statistics at the pace of whole batches, where a layer sees them in several parts.

A batch norm moves its running statistics by ``momentum`` m at every forward. A batch in k parts would move them k
times, each by noisier statistics. With ``1 - (1 - m)**(1 / k)`` the parts together forget as much as one batch does,
and the statistics are a mean over the parts. The variance between parts is not in it: no part sees it. What the layer
*normalises* by in training stays the part's own.
"""

from torch import nn

from lightning_vram.private_names.torch.modules import BatchNormBase, NormBase


def find_batch_norms(module: nn.Module) -> tuple[str, ...]:
    """Names of the layers within ``module`` that normalise by the statistics of the batch as things stand."""
    return tuple(
        name for name, part in module.named_modules() if isinstance(part, BatchNormBase) and _is_of_batch(part)
    )


class NormMomentum:
    """Scales and restores the momentum of all layers with running statistics.

    Layers in eval mode at the time of :meth:`scale`, layers without running statistics, and those that take the
    cumulative mean (``momentum=None``: it is right in any case) are left alone.

    Args:
        module: Whose layers, as they are now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = {name: part for name, part in module.named_modules() if isinstance(part, NormBase)}
        self._plain: dict[str, float] = {}
        self._written: dict[str, float] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted names of the layers whose statistics are corrected, as things stand."""
        return tuple(name for name, layer in self._layers.items() if _is_moving(layer))

    def scale(self, share: float) -> None:
        """Let one update count as much as ``share`` of an update.

        What counts is the momentum before the first call since :meth:`restore`, so that two objects can be nested.

        Args:
            share: 1 / k for each of k equal parts of a batch; in (0, 1].
        """
        for name in self.names:
            layer = self._layers[name]
            momentum = self._plain.setdefault(name, layer.momentum)  # type: ignore[arg-type]
            self._written[name] = momentum if share == 1 else 1 - (1 - momentum) ** share  # 1 to the bit
            layer.momentum = self._written[name]

    def restore(self) -> None:
        """Put back what was there, unless somebody else has written since. Calling it again does nothing."""
        for name, momentum in self._plain.items():
            if self._layers[name].momentum == self._written[name]:
                self._layers[name].momentum = momentum
        self._plain, self._written = {}, {}


def _is_moving(layer: NormBase) -> bool:
    return layer.training and layer.track_running_stats and layer.momentum is not None


def _is_of_batch(layer: BatchNormBase) -> bool:
    # Without running statistics it goes by the batch in eval mode, too.
    return layer.training or layer.running_mean is None
