"""Drop every activation that is cheap to make again; gradients stay what they are, to the last bit.

Convolution-norm-activation keeps two tensors per pair, transformers keep the results of norms, GELUs, dropout and
casts. All of them can be made again from tensors that are kept anyway, at the price of one more pass over memory. See
:mod:`lightning_vram.techniques.recompute` for the mechanism and where it does not help.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_vram.callbacks.namespace import check_trainer
from lightning_vram.callbacks.seam import before_strategy_setup, withdraw_from_strategy_setup
from lightning_vram.callbacks.step_seam import StepSeam
from lightning_vram.memory.units import format_bytes, parse_bytes
from lightning_vram.techniques.recompute import Recomputation


class InPlaceFusion(Callback):
    """Drop what is cheap to make again, in every training step of any LightningModule; its code stays as it is.

    Weights, gradients, buffers and random numbers are those of the plain run, to the bit. Works under any eager code
    (functional calls, residual sums, custom functions), with autocast, accumulation, DDP, FSDP2, manual optimization
    and gradient penalties. Nothing is changed in the module, nothing is stored in checkpoints.

    Args:
        min_bytes: Smaller tensors are kept: an ``int``, or text such as ``"4KiB"``.
        dropout: ``"mask"`` keeps masks as bits; ``"replay"`` keeps the state of the generator and draws again.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument has a value that is not allowed.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import InPlaceFusion
        >>> trainer = pl.Trainer(callbacks=[InPlaceFusion()], logger=False)
    """

    def __init__(self, min_bytes: int | str = 1024, dropout: Literal["mask", "replay"] = "mask") -> None:
        self.min_bytes = parse_bytes(min_bytes, "InPlaceFusion(min_bytes)")
        _check_choice("dropout", dropout, ("mask", "replay"))
        self.dropout = dropout
        self._seam: StepSeam | None = None
        self._recomputation: Recomputation | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer("InPlaceFusion", trainer)
        self._undo()  # a fit whose end another callback's error cut short
        if stage == "fit":
            _check_strategy(trainer)
            before_strategy_setup(trainer, lambda: self._apply(trainer))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        withdraw_from_strategy_setup(trainer)
        self._undo()

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_seam": None, "_recomputation": None}  # a copy is not part of any run

    def _apply(self, trainer: pl.Trainer) -> None:
        self._seam = StepSeam(trainer.strategy, "training_step", lambda: self._step(trainer))

    @contextmanager
    def _step(self, trainer: pl.Trainer) -> Iterator[None]:
        is_first = self._recomputation is None
        if self._recomputation is None:
            self._recomputation = Recomputation(
                trainer.lightning_module, min_bytes=self.min_bytes, dropout=self.dropout
            )
        with self._recomputation:
            yield
        if is_first:
            self._tell(self._recomputation)

    def _tell(self, recomputation: Recomputation) -> None:
        report = recomputation.report
        if not report.num_dropped:
            self._undo()
            rank_zero_warn(
                "InPlaceFusion found nothing to drop in the first training step and is off for this fit. "
                "Layers that are checkpointed or compiled are left to those."
            )
            return
        plain_bytes = report.dropped_bytes + report.kept_bytes
        rank_zero_info(
            f"InPlaceFusion keeps {format_bytes(report.kept_bytes)} of {format_bytes(plain_bytes)} for the backward: "
            f"{report.num_dropped} tensors are made again."
        )
        for operator, count in report.differing.items():
            rank_zero_info(f"InPlaceFusion keeps {count} results of {operator}: a second run gave other bits.")

    def _undo(self) -> None:
        if self._seam is not None:
            self._seam.remove()
        self._seam = self._recomputation = None


def _check_choice(argument: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"InPlaceFusion({argument}) must be one of {listed}, got {value!r}.")


def _check_strategy(trainer: pl.Trainer) -> None:
    if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
        raise MisconfigurationException(
            f"InPlaceFusion does not work with {type(trainer.strategy).__name__}: it frees and moves parameters that "
            "activations are made again from. Use ModelParallelStrategy (FSDP2), 'ddp' or a single device."
        )
