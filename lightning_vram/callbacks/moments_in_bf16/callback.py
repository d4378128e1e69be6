"""Keep the moments of Adam and its kin in bfloat16: 4 bytes of optimizer state for each weight in place of 8.

Parameters and gradients stay float32, and so do the numbers that a step computes with. It costs reading and writing the
moments once more in each step, and 12 bytes for each of some million weights at a time. It does not help where weights,
gradients or activations are the most of a step.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_vram.callbacks.hook_points import FitTechnique, refuse_moved_parameters
from lightning_vram.optimizers.narrow import NarrowMoments
from lightning_vram.optimizers.stepping import KINDS, steps_like


class MomentsInBF16(FitTechnique):
    """Hold the moments of ``torch.optim``'s Adam, AdamW, Adamax, NAdam and RAdam in bfloat16 during a fit.

    On one device, under DDP, under FSDP2 and under ``fsdp_offload``, where it is ``host_state="bf16"`` and holds for
    what is on the device, too. Other optimizers of the run are left alone. What a step leaves in a moment is rounded at
    random, as it follows from the number of steps and the place of each number: all ranks that have the same moments
    round alike, a resumed run has the bits of one that was not interrupted, and no source of randomness is used.

    Checkpoints hold plain bfloat16 tensors under the usual names; a run without this callback loads them as float32,
    and this one loads those of any run. After the fit moments become float32 when the optimizer steps by itself.

    Raises:
        MisconfigurationException: In ``setup``, if the Trainer is one of ``pytorch_lightning``, has another of these,
            FSDP1, DeepSpeed or ``host_state="8bit"``. Before training, if no optimizer has such moments.
        ValueError: Before training, if such an optimizer has weights that are not float32.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import MomentsInBF16
        >>> trainer = pl.Trainer(callbacks=[MomentsInBF16()], logger=False)
    """

    def __init__(self) -> None:
        self._moments: NarrowMoments | None = None
        self._strategy: Any = None  # that does it itself

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        refuse_moved_parameters("MomentsInBF16", trainer, "moments belong to")
        others = [one for one in trainer.callbacks if isinstance(one, MomentsInBF16)]  # type: ignore[attr-defined]
        if len(others) > 1:
            raise MisconfigurationException("Two MomentsInBF16 in one Trainer: leave one out.")
        strategy: Any = trainer.strategy
        if hasattr(strategy, "moments_in_bf16") and strategy.arguments.host_state == "8bit":
            raise MisconfigurationException(
                "MomentsInBF16 does not work with FSDPOffloadStrategy(host_state='8bit'), which has moments in 8 bit: "
                "leave one out."
            )

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        if hasattr(trainer.strategy, "moments_in_bf16"):
            self._strategy = trainer.strategy
            self._strategy.moments_in_bf16 = True
        else:
            self._moments = NarrowMoments(trainer.lightning_module)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not any(steps_like(type(optimizer), KINDS) for optimizer in trainer.optimizers):
            able = ", ".join(kind.__name__ for kind in KINDS)
            found = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
            raise MisconfigurationException(
                f"MomentsInBF16 is for the moments of {able}, got {found}: use one of these, as torch.optim has it, or "
                "leave MomentsInBF16 out."
            )
        if self._moments is not None:
            self._moments.attach(trainer.optimizers)

    @override
    def _undo(self) -> None:
        moments, self._moments = self._moments, None
        strategy, self._strategy = self._strategy, None
        if moments is not None:
            moments.let_go()
        if strategy is not None:
            strategy.moments_in_bf16 = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_moments": None, "_strategy": None}  # a copy is not part of any run
