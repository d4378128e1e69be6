"""Optimizer steps under a loss scale: of the plugin, or of the user's code with the scaler itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_vram.core.surgery.shadow import Shadow, instead
from lightning_vram.techniques.mixed_precision import LossScaling


class ScaledSteps:
    """Moves the scale once after all optimizer steps that follow one backward. Patches the scaler."""

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        over_ranks: Callable[[Tensor], Tensor] | None,  # how ranks agree on an overflow
        on_end: Callable[[int], None],  # gets the number of steps that were skipped
    ) -> None:
        self.scaling = LossScaling(scaler)
        self.is_deferring = False  # more steps may follow the same backward
        self.num_overflowed = 0  # since the scale moved
        self._has_stepped = False
        self._over_ranks = over_ranks
        self._on_end = on_end
        self._patches: list[Shadow] = []

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Keep the gradients of these optimizers correctly scaled from now on."""
        scaler = self.scaling.scaler
        self.scaling.watch(optimizers)
        if not self._patches and scaler.is_enabled():
            own: dict[str, Callable[..., Any]] = {
                "scale": self.scale,
                "unscale_": self.unscale,
                "step": self.step,
                "update": self._update,
                "get_scale": self._get_scale,
            }
            self._patches = [Shadow(scaler, name, instead(call)) for name, call in own.items()]

    def remove(self) -> None:
        """Undo the patches of the scaler. Calling it again does nothing."""
        while self._patches:
            self._patches.pop().remove()

    def scale(self, loss: Any) -> Any:
        """Scale what backward is called on next; the scale moves first if there were steps."""
        self.end()
        return self.scaling.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of ``optimizer``, which may be wrapped, if they are scaled."""
        self.scaling.unscale(_without_wrapper(optimizer))

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step, or skip the step. Returns what ``optimizer.step`` does, ``None`` if it was skipped."""
        result = self.scaling.step(_without_wrapper(optimizer), self._over_ranks, **kwargs)
        self._has_stepped = True
        self.num_overflowed += result.overflowed
        if not self.is_deferring:
            self.end()
        return result.output

    def end(self) -> None:
        """Let the scale move, if there were steps since it did."""
        if self._has_stepped:
            num_overflowed, self.num_overflowed, self._has_stepped = self.num_overflowed, 0, False
            self.scaling.update()
            self._on_end(num_overflowed)

    def _update(self, new_scale: float | Tensor | None = None) -> None:
        self.end()
        if new_scale is not None:
            scaler = self.scaling.scaler
            type(scaler).update(scaler, new_scale)

    def _get_scale(self) -> float:
        """The scale, as it will be where it has still to move: much code reads it to see whether a step was skipped."""
        scaler = self.scaling.scaler
        return type(scaler).get_scale(scaler) * (scaler.get_backoff_factor() if self.num_overflowed else 1.0)


def _without_wrapper(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, of what ``self.optimizers()`` of a LightningModule returns."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
