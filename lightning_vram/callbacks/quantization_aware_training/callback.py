"""Quantization-aware training (QAT): train with quantized weights and inputs, for deployment in 8 or 4 bits."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, get_args

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_vram.argument_checks import check_choice, check_kind, check_number
from lightning_vram.callbacks.hook_points import FitTechnique, check_trainer, refuse_moved_parameters
from lightning_vram.core.layers import LayerPattern, check_layers
from lightning_vram.private_names.lightning import refuse_callbacks
from lightning_vram.techniques.quantization_aware_training import (
    FakeQuantization,
    Scheme,
    apply_fake_quantization,
    save_quantized,
)

_REFUSED = {
    "QuantizeFrozenWeights": "quantizes weights already",
    "TokenTiling": "would move the range of a layer's inputs with each tile",
    "WeightAveraging": "copies the module without the ranges of inputs",
}


class QuantizationAwareTraining(FitTechnique):
    """Train with fake-quantized linear layers and convolutions, and save a quantized copy at the end.

    Other names: QAT, fake quantization. Weights are quantized per output channel to 8 or 4 bits, inputs to 256 levels
    of a range that follows the batches. Gradients pass straight through (Jacob et al. 2018,
    https://arxiv.org/abs/1712.05877). All other layers stay in floating point. Validation during the fit shows the
    metrics of the quantized model.

    Runs on one device and under DDP, where the ranges of rank 0 are used. Checkpoints hold full-precision weights, and
    the ranges in the state of this callback; a resumed run is exact. After the fit the module computes in full
    precision again. Load the saved file with ``load_quantized``.

    Args:
        scheme: Bits of weights: ``"int8"`` or ``"int4"``.
        start_epoch: First epoch, counted from 0, with quantization. A later start takes less time, and its ranges are
            those of weights that have settled.
        layers: ``"auto"``: all linear layers and convolutions, except those that share their weight with another module
            (a head tied to an embedding). Otherwise class names, module names, globs or classes: these layers, and
            layers inside them.
        save: File for the quantized copy, relative to ``trainer.default_root_dir``. ``None`` saves none. A run with
            ``fast_dev_run`` saves none either.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an invalid value. Before training, if ``layers`` matches no layer that can be
            quantized, or one that shares its weight with another module.
        MisconfigurationException: In ``setup``, if the Trainer comes from ``pytorch_lightning``, has
            ``QuantizeFrozenWeights``, ``TokenTiling`` or ``WeightAveraging``, or a strategy that shards weights.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import QuantizationAwareTraining
        >>> trainer = pl.Trainer(callbacks=[QuantizationAwareTraining("int8", start_epoch=2)], logger=False)
    """

    def __init__(
        self,
        scheme: Scheme = "int8",
        start_epoch: int = 0,
        layers: LayerPattern | Sequence[LayerPattern] = "auto",
        save: str | None = "quantized.pt",
    ) -> None:
        check_choice("QuantizationAwareTraining(scheme)", scheme, get_args(Scheme))
        check_number("QuantizationAwareTraining(start_epoch)", start_epoch, int, "an int", at_least=0)
        check_layers("QuantizationAwareTraining(layers)", layers)
        check_kind("QuantizationAwareTraining(save)", save, str | None, "a path or None")
        self.scheme, self.start_epoch, self.layers, self.save = scheme, start_epoch, layers, save
        self.ranges: dict[str, Tensor] = {}  # of inputs, by the name of the layer; those of the last fit
        self._quantization: FakeQuantization | None = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"ranges": self.ranges if self._quantization is None else self._quantization.ranges()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ranges = dict(state_dict["ranges"])
        if self._quantization is not None:  # a strategy that restores late
            self._quantization.load_ranges(self.ranges)

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        _check_strategy("QuantizationAwareTraining", trainer)
        self.ranges = {}
        refuse_callbacks("QuantizationAwareTraining", trainer, _REFUSED)

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        self._quantization = apply_fake_quantization(module, self.scheme, self.layers)
        self._quantization.load_ranges(self.ranges)
        if not self._quantization.layers:
            rank_zero_warn(
                f"QuantizationAwareTraining does nothing: {type(module).__name__} has no linear layer or convolution."
            )

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._quantization is not None:
            self._quantization.is_on = trainer.current_epoch >= self.start_epoch

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # In a fast_dev_run a file may be there, of a run that was meant.
        if self.save is None or self._quantization is None or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        path = Path(trainer.default_root_dir) / self.save
        save_quantized(pl_module, self._quantization, path)
        rank_zero_info(f"QuantizationAwareTraining saved {path}: lightning_vram.load_quantized(module, path) loads it.")

    @override
    def _undo(self) -> None:
        if self._quantization is not None:
            self.ranges = self._quantization.ranges()
            self._quantization.remove()
        self._quantization = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_quantization": None}  # a copy is not part of any run


def _check_strategy(name: str, trainer: pl.Trainer) -> None:
    """Refuse strategies that shard weights."""
    refuse_moved_parameters(name, trainer, "scales are taken from")
    if hasattr(type(trainer.strategy), "device_mesh"):  # ModelParallelStrategy, fsdp_offload
        raise MisconfigurationException(
            f"{name} does not work with {type(trainer.strategy).__name__}: it shards weights. Use 'ddp' or one device."
        )


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
    check_choice("quantize_after_fit(scheme)", scheme, (*get_args(Scheme), None))
    module = _find_fitted_module(trainer)
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
    rank_zero_info(f"quantize_after_fit saved {path}:\n{QuantizedMetrics(before, after)}")
    return QuantizedMetrics(before, after)


def _find_fitted_module(trainer: pl.Trainer) -> pl.LightningModule:
    check_trainer("quantize_after_fit", trainer)
    _check_strategy("quantize_after_fit", trainer)
    why = "also changes the module in validation"
    refuse_callbacks("quantize_after_fit", trainer, {"QuantizeFrozenWeights": why, "WeightAveraging": why})
    module: pl.LightningModule | None = getattr(trainer.strategy, "lightning_module", None)
    if module is None:
        raise RuntimeError("quantize_after_fit(trainer) must have fitted a module: call trainer.fit first.")
    return module
