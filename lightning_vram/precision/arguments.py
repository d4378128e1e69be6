"""Arguments and runs that the plugin refuses, before anything has changed."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.core.layers import LayerPattern, check_layers
from lightning_vram.memory.device.accelerators import has_native_bf16
from lightning_vram.optimizers.bf16_weights import SCHEMES
from lightning_vram.optimizers.step_round import iterate_parameters
from lightning_vram.private_names.torch import can_autocast

Choice = Literal["auto", "bf16", "fp16", "bf16-mixed", "16-mixed"]  # of a user
Precision16 = Literal["bf16-mixed", "16-mixed"]  # Lightning's names
OnLimit = Literal["error", "bf16", "fp32"]

_PRECISIONS: dict[str, Precision16 | None] = {
    "auto": None,
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "bf16-mixed": "bf16-mixed",
    "16-mixed": "16-mixed",
}
DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class Settings:
    """Arguments of the plugin that change the module."""

    fp32_modules: tuple[LayerPattern, ...] = ()
    low_precision_norms: bool = False  # whether outputs of norms stay in 16 bits
    recast_in_backward: bool = False  # whether weights are cast again in the backward
    parameters: str = "fp32"  # how they are stored
    check_updates: bool = False  # whether to count lost updates

    @property
    def is_lean(self) -> bool:
        """Whether parameters are stored in 16 bits."""
        return self.parameters != "fp32"


def check_choice(precision: object) -> Precision16 | None:
    """Translate what the user wrote; ``None`` means ``"auto"``."""
    if not isinstance(precision, str):
        raise TypeError(
            f"LeanMixedPrecision(precision) must be a string, got {precision!r} of type {type(precision).__name__}."
        )
    if precision not in _PRECISIONS:
        raise ValueError(
            f"LeanMixedPrecision(precision) must be 'auto', 'bf16' (or 'bf16-mixed') or 'fp16' (or '16-mixed'), got "
            f"{precision!r}. For other precisions use Trainer(precision=...) without this plugin."
        )
    return _PRECISIONS[precision]


def resolve_precision(choice: Precision16 | None, device_type: str) -> Precision16:
    """Choose for a device: bf16 where its hardware computes in it, else fp16; or check what was chosen."""
    precision = choice or ("bf16-mixed" if has_native_bf16(device_type) else "16-mixed")
    if why := _why_not(device_type, DTYPES[precision]):
        other = "bf16" if precision == "16-mixed" else "fp16"
        raise MisconfigurationException(
            f"LeanMixedPrecision(precision={'fp16' if precision == '16-mixed' else 'bf16'!r}) does not work on "
            f"{device_type!r} devices: {why}. Use {other!r}, or Trainer(precision='32-true') without this plugin."
        )
    if choice == "bf16-mixed" and not has_native_bf16(device_type):
        rank_zero_warn(
            f"LeanMixedPrecision(precision='bf16'): this {device_type} device emulates bfloat16, which is slow. 'auto' "
            "would choose float16 with loss scaling."
        )
    return precision


def _why_not(device_type: str, dtype: torch.dtype) -> str | None:
    """Return why autocast does not support a dtype on a device, which torch may only warn about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            is_enabled = can_autocast(device_type, dtype)
        except RuntimeError as error:
            return str(error).rstrip(".")
    if is_enabled:
        return None
    return str(caught[-1].message).splitlines()[0].rstrip(".") if caught else "autocast is not available"


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
    _check_one_of("on_overflow_limit", on_overflow_limit, get_args(OnLimit))
    if max_consecutive_overflows is not None:
        check_positive_int("LeanMixedPrecision(max_consecutive_overflows)", max_consecutive_overflows)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            "LeanMixedPrecision(scaler) must be a torch.amp.GradScaler or None, got "
            f"{scaler!r} of type {type(scaler).__name__}."
        )


def check_combination(precision: str | None, settings: Settings, scaler: object) -> None:
    """Refuse a scaler with bfloat16, bfloat16 weights with float16, and a count of lost updates where none is lost."""
    if precision == "bf16-mixed" and scaler is not None:
        raise ValueError("LeanMixedPrecision(scaler) is for 'fp16', got one with 'bf16', which has none. Leave it out.")
    if precision == "16-mixed" and settings.is_lean:
        raise ValueError(
            f"LeanMixedPrecision(parameters={settings.parameters!r}) stores bfloat16 weights, which do not work with "
            "float16. Use precision='bf16', or parameters='fp32'."
        )
    if settings.check_updates and settings.parameters not in ("bf16+kahan", "bf16+stochastic"):
        raise ValueError(
            "LeanMixedPrecision(check_updates=True) counts updates that parameters='bf16+kahan' or 'bf16+stochastic' "
            f"rounds away, got parameters={settings.parameters!r}, which loses none: leave it out."
        )


def refuse_trainer(trainer: pl.Trainer, parameters: str, running: pl.Trainer | None) -> None:
    """Refuse a second run at a time, DeepSpeed, and callbacks that put float32 weights among bf16 ``parameters``."""
    if running is not None and running is not trainer and running.state.status == TrainerStatus.RUNNING:
        raise MisconfigurationException(
            "This LeanMixedPrecision belongs to a trainer that is running. Create another one for the inner trainer."
        )
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        raise MisconfigurationException(
            "LeanMixedPrecision does not work with DeepSpeedStrategy, which casts, scales and clips by itself. Use "
            "Trainer(precision=...) there, or another strategy here."
        )
    for kind, why in _REFUSED_CALLBACKS.items() if parameters != "fp32" else ():
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, kind):
                raise MisconfigurationException(
                    f"LeanMixedPrecision(parameters={parameters!r}) does not work with {type(callback).__name__}, "
                    f"which {why}."
                )


def refuse_optimizers(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that do not work with a loss scale."""
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise MisconfigurationException(
            "LeanMixedPrecision(precision='fp16') does not work with LBFGS, which evaluates the loss several times "
            "per step, and cannot skip one that overflows. Use precision='bf16', or another optimizer."
        )
    names = {parameter: name for name, parameter in module.named_parameters()}
    owners: dict[Tensor, int] = {}
    for index, optimizer in enumerate(optimizers):
        for parameter in iterate_parameters(optimizer):
            owner = owners.setdefault(parameter, index)
            if owner != index:
                kinds = [f"{type(optimizers[place]).__name__} (number {place})" for place in (owner, index)]
                raise MisconfigurationException(
                    "LeanMixedPrecision(precision='fp16') does not work with optimizers that share parameters, as "
                    f"{kinds[0]} and {kinds[1]} share {names.get(parameter, 'one')!r}: each would unscale its "
                    "gradient. Use precision='bf16', or one optimizer with parameter groups."
                )


def _check_one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"LeanMixedPrecision({name}) must be one of {', '.join(map(repr, known))}, got {value!r}.")
