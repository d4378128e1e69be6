"""Free gradients before the next forward instead of after it.

Lightning's closure runs the forward, then zeroes, then runs the backward: the gradients of the last step are alive
through the next forward, where activations pile up. Here zeroing comes first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.callbacks.hook_points import FitTechnique, refuse_several
from lightning_vram.core.patching import MethodPatch
from lightning_vram.memory.units import format_bytes
from lightning_vram.private_names.lightning import MAKE_ZERO_GRAD
from lightning_vram.techniques.early_release import PacedCollection, gradient_bytes


def why_not_first(trainer: pl.Trainer) -> str | None:
    """Return why zeroing stays where it is; ``None`` if it may come first."""
    strategy, module = trainer.strategy, trainer.lightning_module
    name, zeroing = type(strategy).__name__, "on_before_zero_grad"
    if strategy.handles_gradient_accumulation:
        return f"{name} manages and zeroes them itself."
    offload = getattr(getattr(strategy, "arguments", None), "offload", "none")  # of fsdp_offload
    if offload != "none":  # zeroing would wait for steps that run alongside the forward
        return f"{name}(offload={offload!r}) stores them on the host."
    hooks = [(type(module).__name__, one) for one in (zeroing, "optimizer_zero_grad") if is_overridden(one, module)]
    hooks += [(type(one).__name__, zeroing) for one in trainer.callbacks if is_overridden(zeroing, one, pl.Callback)]  # type: ignore[attr-defined]
    if hooks:
        hook = ".".join(hooks[0])
        return f"{hook} would run before training_step, which may read what it changes. Use on_train_batch_end instead."
    return None


Zero = Callable[[], None]


class EarlyRelease(FitTechnique):
    """Zero gradients before the forward instead of after it. Exact.

    Peak memory of the forward falls by the size of the gradients. ``on_train_batch_end``, loggers and checkpoints still
    see the gradients; ``training_step`` finds ``None`` instead of those of the step before. During gradient
    accumulation gradients stay. If the module or a callback has its own ``on_before_zero_grad`` or
    ``optimizer_zero_grad``, nothing changes, with a warning: the hook would run before ``training_step``. In manual
    optimization your ``training_step`` calls ``zero_grad``; :class:`~lightning_vram.LeakDetector` warns if it does so
    late. Nothing is stored in checkpoints.

    Args:
        collect_every_n_steps: Run Python's garbage collector after every n-th optimizer step, on all ranks together,
            and at no other time in training, so that ranks do not wait for each other's collections. Takes tenths of a
            second in a large program. ``None`` leaves the collector unchanged.

    Raises:
        TypeError: If ``collect_every_n_steps`` is not an integer.
        ValueError: If it is smaller than 1.
        MisconfigurationException: In ``setup``, if the trainer has several.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import EarlyRelease
        >>> trainer = pl.Trainer(callbacks=[EarlyRelease(collect_every_n_steps=500)], logger=False)
    """

    def __init__(self, collect_every_n_steps: int | None = None) -> None:
        if collect_every_n_steps is not None:
            check_positive_int("EarlyRelease(collect_every_n_steps)", collect_every_n_steps)
        self.collect_every_n_steps = collect_every_n_steps
        self._patch: MethodPatch | None = None
        self._collection: PacedCollection | None = None
        self._has_reported = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        refuse_several(trainer, EarlyRelease, "EarlyRelease can be used once, got several. Remove all but one.")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel) and model.gradient_as_bucket_view:
            self._has_reported = True  # buckets are freed once, in the second batch
        if self.collect_every_n_steps is not None:
            self._collection = PacedCollection(self.collect_every_n_steps, trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if self._collection is not None:
            self._collection.note_step(trainer.global_step)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._collection is not None:
            self._collection.end()  # ranks do not wait for each other there

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._collection is not None:
            self._collection.resume()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | self._between_runs()

    def _between_runs(self) -> dict[str, Any]:
        return {"_patch": None, "_collection": None, "_has_reported": False}

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        if (why := why_not_first(trainer)) is not None:
            rank_zero_warn(f"EarlyRelease does not free gradients: {why}")
        elif trainer.lightning_module.automatic_optimization:
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            self._patch = MethodPatch(loop, MAKE_ZERO_GRAD, partial(partial, self._zero_first))

    def _zero_first(
        self, make_zero: Callable[[int, Optimizer], Zero | None], batch_idx: int, optimizer: Optimizer
    ) -> Zero | None:
        """Replace what makes the zeroing of a batch: Lightning calls it with the closure, before the forward."""
        zero = make_zero(batch_idx, optimizer)
        if zero is not None:  # else gradients accumulate
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            freed_bytes = 0 if self._has_reported else gradient_bytes(parameters)
            optimizer.zero_grad()
            if freed_bytes:
                self._report(freed_bytes, gradient_bytes(parameters))
        return zero  # where it was: the loop counts it, and a forward may fill gradients itself

    def _report(self, before_bytes: int, after_bytes: int) -> None:
        self._has_reported = True
        if not after_bytes:
            rank_zero_info(f"EarlyRelease frees {format_bytes(before_bytes)} of gradients before each forward.")
            return
        if self._patch is not None:
            self._patch.remove()
        rank_zero_warn(
            f"EarlyRelease does not free gradients: zero_grad of your optimizer keeps {format_bytes(after_bytes)} "
            "of them."
        )

    @override
    def _undo(self) -> None:
        if self._patch is not None:
            self._patch.remove()
        if self._collection is not None:
            self._collection.end()
        vars(self).update(self._between_runs())
