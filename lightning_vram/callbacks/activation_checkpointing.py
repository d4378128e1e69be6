"""Recompute layers in the backward instead of keeping what they computed in the forward.

Activations are most of the memory of most runs. A checkpointed layer keeps its inputs only and runs its forward a
second time when the backward reaches it: about a third more compute for a small part of the activation memory. See
:mod:`lightning_vram.techniques.checkpointing` for the mechanism and where it does not help.
"""

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_vram.callbacks.namespace import check_trainer
from lightning_vram.callbacks.seam import before_strategy_setup, withdraw_from_strategy_setup
from lightning_vram.memory.checks import check_positive_int
from lightning_vram.techniques.checkpointing import CheckpointingHandle, apply_activation_checkpointing
from lightning_vram.techniques.layer_selection import LayerSelection


class ActivationCheckpointing(Callback):
    """Checkpoint layers of any LightningModule while it is fitted; its code stays as it is.

    Weights, gradients, random numbers and buffers are those of the plain run, to the bit: dropout draws the same mask,
    BatchNorm moves its statistics once per step. Works the same on every rank, under any strategy, with accumulation
    and manual optimization. The layers change their class for the time of the fit and change back after it, also if
    it fails. Nothing is stored in checkpoints.

    Args:
        layers: ``"auto"`` finds the blocks the model repeats: the classes it names in ``_no_split_modules``, else the
            children of its outermost ``ModuleList``, ``ModuleDict`` or ``Sequential`` with two or more of one class,
            else the convolution-norm-activation stages of its ``Sequential``s. Otherwise class names
            (``"TransformerEncoderLayer"``), module names, globs over module names (``"net.blocks.*"``; ``*`` stays
            within one part of a name, ``**`` crosses dots), or classes; one or a list. Where matches are nested the
            outermost is taken.
        every_n_layers: Checkpoint the first chosen layer and every n-th after it: less recomputation, more memory.

    Raises:
        TypeError: If ``layers`` holds something else than text and module classes, or ``every_n_layers`` is no
            ``int``.
        ValueError: If ``layers`` is empty or ``every_n_layers`` is smaller than 1.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import ActivationCheckpointing
        >>> trainer = pl.Trainer(callbacks=[ActivationCheckpointing(layers="net.blocks.*")], logger=False)
    """

    def __init__(
        self, layers: str | type[nn.Module] | Sequence[str | type[nn.Module]] = "auto", every_n_layers: int = 1
    ) -> None:
        _check_layers(layers)
        check_positive_int("ActivationCheckpointing(every_n_layers)", every_n_layers)
        self.layers = layers
        self.every_n_layers = every_n_layers
        self._handle: CheckpointingHandle | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer("ActivationCheckpointing", trainer)
        self._undo()  # a fit whose end another callback's error cut short
        if stage == "fit":
            before_strategy_setup(trainer, lambda: self._apply(trainer.lightning_module))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        withdraw_from_strategy_setup(trainer)
        self._undo()

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_handle": None}  # a copy of the callback has not changed any module

    def _apply(self, pl_module: pl.LightningModule) -> None:
        try:
            self._handle = apply_activation_checkpointing(
                pl_module, layers=self.layers, every_n_layers=self.every_n_layers
            )
        except ValueError as error:
            raise MisconfigurationException(f"ActivationCheckpointing: {error}") from None
        rank_zero_info(f"ActivationCheckpointing {_describe(self._handle.selection)}")

    def _undo(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _check_layers(layers: object) -> None:
    patterns = layers if isinstance(layers, Sequence) and not isinstance(layers, str) else [layers]
    name = "ActivationCheckpointing(layers)"
    for pattern in patterns:
        if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
            raise TypeError(
                f"{name} must be 'auto', class names, module names, globs or nn.Module classes, "
                f"got {pattern!r} of type {type(pattern).__name__}."
            )
    if not patterns or "" in patterns:
        raise ValueError(f"{name} must name at least one layer, got {layers!r}. 'auto' finds them.")


def _describe(selection: LayerSelection) -> str:
    names = [layer.name for layer in selection.layers]
    shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
    text = f"recomputes {len(names)} layer{'s' if len(names) > 1 else ''} in backward: {shown}."
    if selection.nested:
        text += f" {len(selection.nested)} more matches lie inside them and are left out, {selection.nested[0]} first."
    return text
