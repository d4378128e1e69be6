"""``toggle_optimizer`` of manual optimization, where parameters are gathered that the optimizers have as shards."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.techniques.sharding import FullSharding


class ToggledOptimizers:
    """Lets what is gathered in the midst of a step follow, until :meth:`remove`.

    Args:
        module: Whose optimizers are toggled.
        sharding: Of it.
    """

    def __init__(self, module: pl.LightningModule, sharding: FullSharding) -> None:
        follow = partial(_then, sharding.agree_on_gradients)
        self._shadows = [Shadow(module, name, follow) for name in ("toggle_optimizer", "untoggle_optimizer")]

    def remove(self) -> None:
        """Leave these methods alone."""
        for shadow in self._shadows:
            shadow.remove()


def _then(follow: Callable[[], None], inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        follow()
        return result

    return call
