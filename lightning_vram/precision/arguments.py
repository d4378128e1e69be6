"""What the plugin accepts and refuses, before anything has changed."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.core.layers.patterns import check_layers
from lightning_vram.optimizers.lean import SCHEMES
from lightning_vram.precision.overflow_watch import ON_LIMIT

_REFUSED_CALLBACKS: dict[type[pl.Callback], str] = {
    StochasticWeightAveraging: "averages weights that bfloat16 has rounded. Use WeightAveraging, or parameters='fp32'",
    ModelPruning: "puts other parameters, in float32, and masks into the module. Use parameters='fp32'",
}


def check_arguments(
    fp32_modules: Any, parameters: object, max_consecutive_overflows: object, on_overflow_limit: object, scaler: object
) -> None:
    """Check the arguments of ``LeanMixedPrecision``."""
    patterns = [fp32_modules] if isinstance(fp32_modules, str | type) else fp32_modules
    if not isinstance(patterns, list | tuple):
        raise TypeError(
            "LeanMixedPrecision(fp32_modules) must be a list of class names, module names, globs or nn.Module classes, "
            f"got {fp32_modules!r} of type {type(fp32_modules).__name__}."
        )
    if fp32_modules:
        check_layers("LeanMixedPrecision(fp32_modules)", fp32_modules)
    if "auto" in patterns:
        raise ValueError("LeanMixedPrecision(fp32_modules) cannot be 'auto': name the modules that need float32.")
    _check_one_of("parameters", parameters, ("fp32", *SCHEMES))
    _check_one_of("on_overflow_limit", on_overflow_limit, ON_LIMIT)
    if max_consecutive_overflows is not None:
        check_positive_int("LeanMixedPrecision(max_consecutive_overflows)", max_consecutive_overflows)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            "LeanMixedPrecision(scaler) must be a torch.amp.GradScaler or None, got "
            f"{scaler!r} of type {type(scaler).__name__}."
        )


def check_combination(precision: str | None, parameters: str, scaler: object) -> None:
    """Refuse what is only used in the other format: a scaler with bfloat16, bfloat16 weights with float16."""
    if precision == "bf16-mixed" and scaler is not None:
        raise ValueError("LeanMixedPrecision(scaler) is for 'fp16', got one with 'bf16', which has none. Leave it out.")
    if precision == "16-mixed" and parameters != "fp32":
        raise ValueError(
            f"LeanMixedPrecision(parameters={parameters!r}) stores bfloat16 weights, which do not work with float16. "
            "Use precision='bf16', or parameters='fp32'."
        )


def refuse_check(parameters: str, *, check_updates: bool) -> None:
    """Refuse to count lost updates with ``parameters`` that lose none."""
    if check_updates and parameters not in ("bf16+kahan", "bf16+stochastic"):
        raise ValueError(
            "LeanMixedPrecision(check_updates=True) counts updates that parameters='bf16+kahan' or 'bf16+stochastic' "
            f"rounds away, got parameters={parameters!r}, which loses none: leave it out."
        )


def refuse_strategy(trainer: pl.Trainer) -> None:
    """Refuse DeepSpeed, which casts, scales and clips by itself."""
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        raise MisconfigurationException(
            "LeanMixedPrecision does not work with DeepSpeedStrategy, which casts, scales and clips by itself. Use "
            "Trainer(precision=...) there, or another strategy here."
        )


def refuse_callbacks(trainer: pl.Trainer, parameters: str) -> None:
    """Refuse callbacks that put other weights, in float32, into the module."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        why = next((why for kind, why in _REFUSED_CALLBACKS.items() if isinstance(callback, kind)), None)
        if why is not None:
            raise MisconfigurationException(
                f"LeanMixedPrecision(parameters={parameters!r}) does not work with {type(callback).__name__}, which "
                f"{why}."
            )


def refuse_second_run(running: pl.Trainer, other: pl.Trainer) -> None:
    """Refuse a run within that of another trainer: a plugin has one scale, and undoes its changes at the end."""
    if running is not other and running.state.status == TrainerStatus.RUNNING:
        raise MisconfigurationException(
            "This LeanMixedPrecision belongs to a trainer that is running. Create another one for the inner trainer."
        )


def _check_one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"LeanMixedPrecision({name}) must be one of {', '.join(map(repr, known))}, got {value!r}.")
