"""Batch norm momentum for micro-batches."""

from torch import nn

from lightning_vram.private_names.torch.modules import BatchNormBase, NormBase


def find_batch_norms(module: nn.Module) -> tuple[str, ...]:
    """Names of the layers within ``module`` that normalise by the statistics of the batch in their present mode."""
    return tuple(
        name
        for name, part in module.named_modules()
        # Without running statistics it normalises by the batch in eval mode, too.
        if isinstance(part, BatchNormBase) and (part.training or part.running_mean is None)
    )


class NormMomentum:
    """Scales and restores the momentum of all layers of a module that have running statistics.

    A batch norm moves its running statistics by ``momentum`` m in every forward. A batch in k parts would move them k
    times, each by noisier statistics. With ``1 - (1 - m)**(1 / k)`` the parts together forget as much as one batch
    does, and the statistics are a mean over the parts, without the variance between parts. In training a layer still
    normalises by the statistics of its own part.

    Layers in eval mode at the time of :meth:`scale`, layers without running statistics, and those with a cumulative
    mean (``momentum=None``, correct in any case) are left alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = {name: part for name, part in module.named_modules() if isinstance(part, NormBase)}
        self._saved: dict[str, float] = {}
        self._written: dict[str, float] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted names of the layers whose statistics are corrected in their present mode."""
        return tuple(
            name
            for name, layer in self._layers.items()
            if layer.training and layer.track_running_stats and layer.momentum is not None
        )

    def scale(self, share: float) -> None:
        """Let one update count as much as ``share`` of an update: 1 / k for each of k equal parts, in (0, 1].

        The momentum before the first call since :meth:`restore` counts, so that two objects can be nested.
        """
        for name in self.names:
            layer = self._layers[name]
            momentum = self._saved.setdefault(name, layer.momentum)  # type: ignore[arg-type]
            self._written[name] = momentum if share == 1 else 1 - (1 - momentum) ** share  # 1 to the bit
            layer.momentum = self._written[name]

    def restore(self) -> None:
        """Put the momentum back, unless other code has written it since. Calling it again does nothing."""
        for name, momentum in self._saved.items():
            if self._layers[name].momentum == self._written[name]:
                self._layers[name].momentum = momentum
        self._saved, self._written = {}, {}
