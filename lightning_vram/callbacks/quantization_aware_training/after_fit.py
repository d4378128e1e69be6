"""Quantize a trained module, save it, and report how its metrics change."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_vram.callbacks.hook_points import check_trainer
from lightning_vram.callbacks.quantization_aware_training.callback import (
    QuantizationAwareTraining,
    check_scheme,
    check_strategy,
)
from lightning_vram.techniques.quantization_aware_training import Scheme, apply_fake_quantization, save_quantized


class QuantizedMetrics(NamedTuple):
    """Validation metrics before and after quantization; prints as a table."""

    before: Mapping[str, float]
    """By name, of the module with full-precision weights."""
    after: Mapping[str, float]
    """By name, of the quantized copy."""

    def __str__(self) -> str:
        rows = [f"{'metric':<24}{'before':>12}{'quantized':>12}"]
        rows += [f"{name:<24}{value:>12.4f}{self.after[name]:>12.4f}" for name, value in self.before.items()]
        return "\n".join(rows)


def quantize_after_fit(
    trainer: pl.Trainer,
    path: str | PathLike[str],
    scheme: Scheme | None = None,
    calibration: Any = None,
    dataloaders: Any = None,
) -> QuantizedMetrics:
    """Save a quantized copy of the module that ``trainer`` has fitted, and validate before and after.

    After a fit with :class:`QuantizationAwareTraining`, layers and input ranges are those of training. Otherwise
    quantization is dynamic: each input is quantized with its own range. With ``calibration`` it is static: the ranges
    come from one validation of that data. The module itself does not change.

    Args:
        trainer: After ``fit``.
        path: File to write, for ``load_quantized``.
        scheme: Bits of weights, ``"int8"`` or ``"int4"``. ``None``: that of training, or ``"int8"``.
        calibration: Loader of batches for ``validation_step``. A few hundred samples are enough.
        dataloaders: Loaders to validate with. ``None``: those of validation in the fit.

    Returns:
        The metrics that validation logs, before and after; also logged as a table.

    Raises:
        TypeError: If ``scheme`` is not a ``str``.
        ValueError: If ``scheme`` is unknown.
        RuntimeError: If ``trainer`` has not fitted a module.
        MisconfigurationException: If the Trainer comes from ``pytorch_lightning``, has ``QuantizeFrozenWeights`` or
            ``WeightAveraging``, or its strategy shards weights.
    """
    module = _check(trainer, scheme)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    trained = next((one for one in callbacks if isinstance(one, QuantizationAwareTraining) and one.ranges), None)
    datamodule = getattr(trainer, "datamodule", None)  # a validation with loaders forgets it
    if dataloaders is None and datamodule is None:
        dataloaders = trainer.val_dataloaders

    def validate(loaders: Any = dataloaders) -> dict[str, float]:
        source = datamodule if loaders is None else None
        found = trainer.validate(module, dataloaders=loaders, datamodule=source, verbose=False)
        return {name: float(value) for metrics in found for name, value in metrics.items()}

    before = validate()
    scheme = scheme or (trained.scheme if trained else "int8")
    quantization = apply_fake_quantization(module, scheme, trained.layers if trained else "auto")
    try:
        quantization.is_on = True
        quantization.is_dynamic = calibration is None and trained is None
        if calibration is not None:
            quantization.observes = True
            validate(calibration)
            quantization.observes = False
        elif trained:
            quantization.load_ranges(trained.ranges)
        after = validate()
        if trainer.is_global_zero:
            save_quantized(module, quantization, path)
    finally:
        quantization.remove()
    result = QuantizedMetrics(before, after)
    rank_zero_info(f"quantize_after_fit saved {path}:\n{result}")
    return result


def _check(trainer: pl.Trainer, scheme: object) -> pl.LightningModule:
    check_trainer("quantize_after_fit", trainer)
    check_strategy("quantize_after_fit", trainer)
    for one in trainer.callbacks:  # type: ignore[attr-defined]
        if type(one).__name__ == "QuantizeFrozenWeights" or isinstance(one, WeightAveraging):
            raise MisconfigurationException(
                f"quantize_after_fit does not work with {type(one).__name__}, which also changes the module in "
                "validation: pass a Trainer without it that has validated the module."
            )
    if scheme is not None:
        check_scheme("quantize_after_fit", scheme)
    module: pl.LightningModule | None = getattr(trainer.strategy, "lightning_module", None)
    if module is None:
        raise RuntimeError("quantize_after_fit(trainer) must have fitted a module: call trainer.fit first.")
    return module
