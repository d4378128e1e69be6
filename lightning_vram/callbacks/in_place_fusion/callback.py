"""Drop activations that are cheap to recompute from other saved tensors, bit-exact, for one more pass over memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_choice
from lightning_vram.callbacks.hook_points import AroundStep, Depth, FitTechnique, refuse_moved_parameters
from lightning_vram.memory.units import parse_bytes
from lightning_vram.techniques.in_place_fusion import Fusion, FusionError, FusionPolicy


class InPlaceFusion(FitTechnique):
    """Drop activations that are cheap to recompute, such as the results of norms, activation functions and dropout.

    With the defaults, weights, gradients, buffers and random numbers are bitwise identical to the baseline; BatchNorm
    updates its running statistics once per step. It works on any eager code (functional calls, residual sums, custom
    functions), with autocast, gradient accumulation, DDP, FSDP2, manual optimization and gradient penalties. The
    module is unchanged after ``fit``, and so are checkpoints.

    Args:
        mode: ``"auto"`` drops the results of cheap operators in eager code, and lets ``torch.compile`` recompute norms
            and activation functions. ``"general"`` leaves compiled code alone.
        inplace: Let activation functions overwrite their input in training steps, if one observed step proved that
            no other operator reads it. This and the next two arguments need a model that takes the same path in every
            step. In manual optimization, gradients of ``prod`` and ``cumprod`` differ by rounding in the observed step.
        abn: ``"invert"`` saves only the output of a batch norm and the LeakyReLU or ELU behind it, and inverts it
            (InPlace-ABN, Rota Bulò et al. 2018, https://arxiv.org/abs/1712.02616). Lossless: gradients differ by the
            rounding of the inverse; norms for which that is too large are skipped, and ``SyncBatchNorm``. No double
            backward. ``None``: off.
        fold_frozen_bn: Fold batch norms in evaluation mode into the convolution before them (not a transposed one),
            for fine-tuning (https://arxiv.org/abs/2305.11624). Lossless.
        min_bytes: Smaller tensors stay saved: an ``int``, or text such as ``"4KiB"``.
        dropout: ``"mask"`` saves masks as bits; ``"replay"`` saves the generator state and draws the mask again.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import InPlaceFusion
        >>> trainer = pl.Trainer(callbacks=[InPlaceFusion()], logger=False)
    """

    def __init__(
        self,
        mode: Literal["auto", "general"] = "auto",
        inplace: bool = False,  # noqa: FBT001, FBT002
        abn: Literal["invert"] | None = None,
        fold_frozen_bn: bool = False,  # noqa: FBT001, FBT002
        min_bytes: int | str = 1024,
        dropout: Literal["mask", "replay"] = "mask",
    ) -> None:
        check_choice("InPlaceFusion(mode)", mode, ("auto", "general"))
        check_bool("InPlaceFusion(inplace)", inplace)
        check_choice("InPlaceFusion(abn)", abn, ("invert", None))
        check_bool("InPlaceFusion(fold_frozen_bn)", fold_frozen_bn)
        check_choice("InPlaceFusion(dropout)", dropout, ("mask", "replay"))
        self.mode = mode
        self.inplace = inplace
        self.abn = abn
        self.fold_frozen_bn = fold_frozen_bn
        self.min_bytes = parse_bytes(min_bytes, "InPlaceFusion(min_bytes)")
        self.dropout = dropout
        self._context: AroundStep | None = None
        self._fusion: Fusion | None = None

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        refuse_moved_parameters("InPlaceFusion", trainer, "activations are recomputed from")

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_context": None, "_fusion": None}  # a copy is not part of any run

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        policy = FusionPolicy(self.mode, self.inplace, self.abn, self.fold_frozen_bn, self.min_bytes, self.dropout)
        self._fusion = fusion = Fusion(trainer.lightning_module, policy, _log)
        self._context = AroundStep(
            trainer.strategy, "training_step", Depth.RECOMPUTATION, lambda *_, **__: self._step(fusion)
        )

    @contextmanager
    def _step(self, fusion: Fusion) -> Iterator[None]:
        was_observing = fusion.is_observing
        try:
            with fusion.step():
                yield
        except FusionError as error:
            raise MisconfigurationException(f"InPlaceFusion: {error}") from None
        if was_observing and not fusion.is_observing and not fusion.is_useful:
            rank_zero_warn(
                "InPlaceFusion found nothing to save in a training step, and costs time. It leaves checkpointed and "
                "compiled layers alone. Leave it out, unless layers are unfrozen later."
            )

    @override
    def _undo(self) -> None:
        for undone in (self._context, self._fusion):
            if undone is not None:
                undone.remove()
        self._context = self._fusion = None


def _log(sentence: str) -> None:
    rank_zero_info(f"InPlaceFusion {sentence}")
