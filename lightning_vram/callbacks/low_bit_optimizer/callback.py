"""Keep what an optimizer keeps for each weight in 8 or 4 bits: 2.06 or 1.06 bytes for Adam's two moments, not 8.

Other names: 8-bit optimizers, quantized optimizer states. Parameters and gradients stay float32, and so do the numbers
that a step computes with. It costs reading and writing the moments once more in each step, in a dozen operators, and 12
bytes for each of some million weights at a time. It does not help where weights, gradients or activations are the most
of a step, or where each parameter has less than 4096 weights.
"""

from functools import partial
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_vram.argument_checks import check_bool
from lightning_vram.callbacks.hook_points import MomentsTechnique
from lightning_vram.optimizers.narrow import Library
from lightning_vram.optimizers.stepping import UpdateCheck
from lightning_vram.private_names.lightning.logging import logs_are_due


class LowBitOptimizer(MomentsTechnique):
    """Hold moments in 8 or 4 bits during a fit: of Adam's kind, SGD with momentum and Lion.

    ``torch.optim``'s Adam, AdamW, Adamax, NAdam, RAdam and SGD, and any optimizer of the name Lion that steps as its
    paper has it. They stay the same objects, with their groups, schedulers, hooks and counts of steps; others of the
    run are left alone. Moments of a parameter with less than 4096 weights, on all ranks together, stay float32.

    On one device, under DDP and FSDP2, and under ``fsdp_offload``, where it is ``host_state="8bit"`` or ``"4bit"`` but
    for small parameters, and holds for what is on the device, too.

    Blocks of 128 numbers share a scale: the largest of them, which is exact. A number is a square of evenly spaced
    roots, of which what is divided by has no zero. What code writes to ``optimizer.state`` is quantized before the next
    step. Checkpoints hold plain float32 tensors on the host under the usual names, which any run loads; this one loads
    those of any run. A resumed run has the bits of an uninterrupted one. After the fit moments are float32 again.

    Source of blocks, and of no zero for what is divided by: Li, Chen and Zhu, "Memory Efficient Optimizers with 4-bit
    States" (2023); of roots: "FlashOptim" (arXiv 2602.23349).

    Args:
        bits: Of a number: 8 (2.06 bytes for each weight of Adam's kind, 1.03 of SGD and Lion) or 4 (1.06, 0.53).
        library: Whose kernels step: ``"own"``, anything anywhere; ``"torchao"``, Adam and AdamW, by code that
            ``torch.compile`` makes; ``"bitsandbytes"``, AdamW, SGD and Lion, 8 bits only. The last two, in extra
            ``lowbit``, step what is not sharded, without ``fused``; what is rounded, and how, is theirs. ``"auto"``:
            on CUDA the first of bitsandbytes and torchao that is installed and can, else our own. The optimizer and
            its checkpoints are the same with all.

        check_updates: Log ``vram/lost_updates``: of the numbers in moments that steps of a batch have moved, the share,
            0 to 1, that rounding has put back, where logs are due. Only with our own steps; those of the batch take
            longer, 12 bytes more for each number of a part, and have the same bits.

    Raises:
        ValueError: If ``bits`` or ``library`` is none of those, or the library has no such bits. Before training, if
            such an optimizer has weights that are not float32, or the library cannot step it.
        TypeError: If ``check_updates`` is no bool.
        ModuleNotFoundError: In ``setup``, if the library is not installed.
        MisconfigurationException: In ``setup``, if the Trainer is one of ``pytorch_lightning``, has another of these or
            ``MomentsInBF16``, FSDP1, DeepSpeed or another ``host_state``. Before training, if no optimizer has such
            moments.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import LowBitOptimizer
        >>> trainer = pl.Trainer(callbacks=[LowBitOptimizer(bits=8)], logger=False)
    """

    def __init__(self, bits: Literal[8, 4] = 8, library: Library = "own", *, check_updates: bool = False) -> None:
        if bits not in (8, 4) or isinstance(bits, bool):
            raise ValueError(f"LowBitOptimizer(bits) must be 8 or 4, got {bits!r}.")
        if library not in get_args(Library):
            named = ", ".join(map(repr, get_args(Library)))
            raise ValueError(f"LowBitOptimizer(library) must be one of {named}, got {library!r}.")
        if library == "bitsandbytes" and bits == 4:
            raise ValueError(
                "LowBitOptimizer(library='bitsandbytes') has states of 8 bits only, got bits=4: use bits=8, or "
                "library='own' or 'torchao'."
            )
        check_bool("LowBitOptimizer(check_updates)", check_updates)
        if check_updates and library != "own":
            raise ValueError(
                f"LowBitOptimizer(check_updates=True) counts in our own steps only, got library={library!r}: use "
                "library='own'."
            )
        super().__init__("8bit" if bits == 8 else "4bit", library)
        self.check_updates = check_updates

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        super()._check(trainer)
        if self.check_updates and hasattr(trainer.strategy, "moments"):  # of fsdp_offload
            raise MisconfigurationException(
                f"LowBitOptimizer(check_updates=True) does not work with {type(trainer.strategy).__name__}, whose "
                "steps may end after the batch: leave check_updates out."
            )

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        if self.check_updates:
            self._updates = UpdateCheck(partial(logs_are_due, trainer))
        super()._apply(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._updates is not None:
            self._updates.begin()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        share = None if self._updates is None else self._updates.share
        if share is not None:
            pl_module.log("vram/lost_updates", share, batch_size=1)
