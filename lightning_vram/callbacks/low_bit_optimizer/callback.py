"""8-bit and 4-bit optimizer state: 2.06 or 1.06 bytes per parameter for Adam's two moments instead of 8.

Other names: 8-bit Adam, 4-bit optimizer, quantized optimizer state. Parameters, gradients and the arithmetic of the
step stay float32. It costs dequantizing and quantizing the moments in each step, a dozen operators, and 12 bytes for
each of a few million weights at a time. It does not help if weights, gradients or activations dominate the peak, or if
each parameter has less than 4096 weights.
"""

from functools import partial
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_choice
from lightning_vram.callbacks.hook_points import MomentsTechnique
from lightning_vram.optimizers.library_moments import Library
from lightning_vram.optimizers.moment_forms import UpdateCheck
from lightning_vram.private_names.lightning import logs_are_due


class LowBitOptimizer(MomentsTechnique):
    """Quantize optimizer state to 8 or 4 bits during a fit: moments of Adam and variants, SGD with momentum, Lion.

    Works with ``torch.optim``'s Adam, AdamW, Adamax, NAdam, RAdam and SGD, and with any optimizer named Lion that
    follows the paper's update rule. The optimizer object, its parameter groups, schedulers and hooks stay the same.
    Other optimizers of the run are left unchanged. Moments of parameters with less than 4096 weights (on all ranks
    together) stay float32.

    Runs on one device, under DDP and FSDP2. Under ``fsdp_offload`` it sets ``host_state="8bit"`` or ``"4bit"``.

    Each block of 128 values has a float32 scale, its absolute maximum, which is stored exactly. Values are quantized on
    a quadratic code (evenly spaced square roots). The second moment has no zero code, so the update never divides by
    zero. Rounding is deterministic: replicas stay identical, and a resumed run is exact. Values that your code writes
    to ``optimizer.state`` are quantized before the next step. Checkpoints hold float32 tensors under the usual names,
    so runs with and without this callback load them. After the fit the moments are float32 again.

    Sources: Li, Chen and Zhu 2023 (arXiv 2309.01507) for blocks and the second moment without zero; "FlashOptim" (arXiv
    2602.23349) for the quadratic code.

    Args:
        bits: 8 (2.06 bytes per parameter for Adam, 1.03 for SGD and Lion) or 4 (1.06 and 0.53).
        library: Whose kernels compute the step. ``"own"``: all optimizers above, on any device. ``"torchao"``: Adam and
            AdamW, compiled by ``torch.compile``. ``"bitsandbytes"``: AdamW, 8 bits only. ``"auto"``: on
            CUDA bitsandbytes, else torchao, if it is installed and supports the optimizer; otherwise ``"own"``. torchao
            and bitsandbytes come with the extra ``lowbit``, need unsharded parameters on CUDA and no ``fused``, and
            round in their own way. Checkpoints of all libraries are interchangeable.
        check_updates: Log ``vram/lost_updates``, a share from 0 to 1: of the moment values that a step changed, how
            many rounding has set back. Only with ``library="own"``. Batches that log take longer, and 12 bytes more for
            each of a few million weights; results do not change.

    Raises:
        ValueError: If ``bits`` or ``library`` is unknown, or the library does not support ``bits``. Before training, if
            the optimizer has weights that are not float32, or the library cannot step it.
        TypeError: If ``check_updates`` is not a bool.
        ModuleNotFoundError: In ``setup``, if the library is not installed.
        MisconfigurationException: In ``setup``, if the Trainer comes from ``pytorch_lightning``, has a second
            ``LowBitOptimizer`` or ``MomentsInBF16``, uses FSDP1 or DeepSpeed, or another ``host_state``. Before
            training, if no optimizer has such moments.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import LowBitOptimizer
        >>> trainer = pl.Trainer(callbacks=[LowBitOptimizer(bits=8)], logger=False)
    """

    def __init__(self, bits: Literal[8, 4] = 8, library: Library = "own", *, check_updates: bool = False) -> None:
        if bits not in (8, 4) or isinstance(bits, bool):
            raise ValueError(f"LowBitOptimizer(bits) must be 8 or 4, got {bits!r}.")
        check_choice("LowBitOptimizer(library)", library, get_args(Library))
        if library == "bitsandbytes" and bits == 4:
            raise ValueError(
                "LowBitOptimizer(library='bitsandbytes') supports 8 bits only, got bits=4: use bits=8, or "
                "library='own' or 'torchao'."
            )
        check_bool("LowBitOptimizer(check_updates)", check_updates)
        if check_updates and library != "own":
            raise ValueError(
                f"LowBitOptimizer(check_updates=True) needs our own kernels, got library={library!r}: use "
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
                "steps may end after the batch: use check_updates=False."
            )

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        if self.check_updates:
            self._updates = UpdateCheck(partial(logs_are_due, trainer))
        super()._apply(trainer)

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if self._updates is not None:
            self._updates.begin()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        share = None if self._updates is None else self._updates.share
        if share is not None:
            pl_module.log("vram/lost_updates", share, batch_size=1)
