"""Checkpoints of a run with quantized weights: with frozen weights, or without."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_vram.core.surgery.shadow import Shadow


class Checkpoints:
    """Patches loading and saving of the module, until :meth:`remove`."""

    def __init__(self, trainer: pl.Trainer, prepare: Callable[[], None], *, has_frozen: bool) -> None:
        self._trainer = trainer
        self._prepare = prepare
        strategy = trainer.strategy
        replaced: dict[str, Callable[..., Any]] = {"load_model_state_dict": self._load}
        if isinstance(strategy, ModelParallelStrategy):
            replaced["load_checkpoint"] = self._load_into_shards
        if not has_frozen:
            replaced["lightning_module_state_dict"] = self._without_frozen
        self._patches = [Shadow(strategy, name, partial(partial, run)) for name, run in replaced.items()]

    def remove(self) -> None:
        """Undo the patches. Calling it again does nothing."""
        for patch in self._patches:
            patch.remove()

    def _load(self, load: Callable[..., None], checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        self._prepare()
        if "state_dict" in checkpoint:  # else the strategy reads it where it is
            checkpoint = {**checkpoint, "state_dict": self._fit(checkpoint["state_dict"])}
        load(checkpoint, *args, **kwargs)

    def _fit(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return weights of a checkpoint in the format that the module has."""
        module = self._trainer.lightning_module
        own, frozen = module.state_dict(), _frozen_names(module)
        for name, value in given.items():
            if _is_packed(value) and isinstance(own.get(name), Tensor) and own[name].is_floating_point():
                raise ValueError(
                    f"the checkpoint has {name} quantized, and this run does not quantize it: name its layer in "
                    "QuantizeFrozenWeights(layers), and freeze it."
                )
        if frozen and frozen.isdisjoint(given):  # it was saved without
            # a module may leave them out of its state_dict, and have strict_loading=False
            return {**given, **{name: _whole(own[name]) for name in frozen & own.keys()}}
        full = {name: given[name] for name in _full_precision_names(given, own)}
        if full:
            module.load_state_dict(full, strict=False)  # into what ``own`` shares
        return {**given, **{name: own[name] for name in full}}

    def _load_into_shards(self, load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a file as ModelParallelStrategy does, parameter by parameter."""
        module = self._trainer.lightning_module
        if not Path(path).is_file():
            return load(path, *args, **kwargs)
        own, frozen, strict = module.state_dict(), _frozen_names(module), module.strict_loading
        given = torch.load(path, mmap=True, map_location="cpu", weights_only=kwargs.get("weights_only"))["state_dict"]
        for name in _full_precision_names(given, own):
            raise ValueError(
                f"the checkpoint has {name} in full precision, and {type(self._trainer.strategy).__name__} would load "
                "it into quantized shards: load it in __init__, or use strategy='fsdp_offload'."
            )
        if frozen.isdisjoint(given) and own.keys() - frozen == given.keys():  # it was saved without
            module.strict_loading = False
        try:
            return load(path, *args, **kwargs)
        finally:
            module.strict_loading = strict

    def _without_frozen(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        frozen = _frozen_names(self._trainer.lightning_module)
        return {name: value for name, value in state_dict().items() if name not in frozen}


def _frozen_names(module: nn.Module) -> set[str]:
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def _is_packed(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.uint8


def _full_precision_names(given: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Names of weights that are quantized here, and not in the checkpoint."""
    return [name for name, value in given.items() if _is_packed(own.get(name)) and value.is_floating_point()]


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
