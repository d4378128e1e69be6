"""Checkpoints of a run with quantized weights: with them, or without anything that is frozen."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_vram.core.surgery.shadow import Shadow


class Checkpoints:
    """Stands between a run and the checkpoints of its module, until :meth:`remove`.

    Args:
        trainer: That is set up.
        prepare: Called before a checkpoint is loaded, which may come before anything else happens to the module.
        has_frozen: Whether checkpoints have what is frozen. Those without it load all the same.
    """

    def __init__(self, trainer: pl.Trainer, prepare: Callable[[], None], *, has_frozen: bool) -> None:
        self._trainer = trainer
        self._prepare = prepare
        strategy = trainer.strategy
        self._shadows = [
            Shadow(strategy, "load_model_state_dict", lambda inner: lambda *a, **k: self._load(inner, *a, **k))
        ]
        if not has_frozen:
            self._shadows.append(
                Shadow(strategy, "lightning_module_state_dict", lambda inner: lambda: self._without_frozen(inner()))
            )

    def remove(self) -> None:
        """Step aside. Twice does nothing."""
        for shadow in self._shadows:
            shadow.remove()

    def _load(self, load: Callable[..., None], checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        self._prepare()
        module = self._trainer.lightning_module
        given, own = checkpoint["state_dict"], module.state_dict()
        frozen = _frozen_names(module)
        for name, value in given.items():
            is_packed = isinstance(value, Tensor) and value.dtype is torch.uint8
            if is_packed and isinstance(own.get(name), Tensor) and own[name].is_floating_point():
                raise ValueError(
                    f"the checkpoint has {name} quantized, and this run does not quantize it: name its layer in "
                    "QuantizeFrozenWeights(layers), and freeze it."
                )
        if frozen and frozen.isdisjoint(given):  # it was saved without
            checkpoint = {**checkpoint, "state_dict": {**given, **{name: own[name] for name in frozen}}}
        load(checkpoint, *args, **kwargs)

    def _without_frozen(self, state: dict[str, Any]) -> dict[str, Any]:
        frozen = _frozen_names(self._trainer.lightning_module)
        return {name: value for name, value in state.items() if name not in frozen}


def _frozen_names(module: nn.Module) -> set[str]:
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}
