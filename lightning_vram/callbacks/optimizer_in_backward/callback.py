"""Step each parameter in the backward as soon as its gradient is complete, and free the gradient.

The largest gradient is alive at a time, in place of all. It costs a call of the optimizer for each parameter. It helps
little where gradients are kept: in an accumulation, over all but its last micro-batch, unless moments take them in.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.argument_checks import check_bool
from lightning_vram.callbacks.hook_points import FitTechnique, gradient_users, why_not_early
from lightning_vram.callbacks.optimizer_in_backward.checks import (
    check_run,
    check_training,
    clips_by_norm,
    leaves_zeros,
)
from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.optimizers.in_backward import BackwardSteps, Clipping
from lightning_vram.private_names.lightning.loops import is_accumulating

MaxNorm = Literal["two-pass", "previous"]


class OptimizerInBackward(FitTechnique):
    """Let the optimizer step each parameter within the backward, and free its gradient at once.

    It is the optimizer that ``configure_optimizers`` returned: the same object, with its groups, schedules, hooks and
    state. Weights are those of the plain run to the bit, and so are checkpoints, which load with and without this
    callback. A parameter that is used several times steps once, when all its parts have come.

    Clipping by value is exact. Clipping by norm needs all gradients before the first step: ``max_norm`` says where the
    norm comes from. In an accumulation all but the last micro-batch add up as usual, and the last backward steps; so
    nothing is approximate there, but gradients are kept over the window. Under DDP parameters step when their bucket is
    reduced, under FSDP2 (``ModelParallelStrategy``) when their shard is.

    After a step parameters have no ``grad``. A backward that fails has stepped the parameters that it had reached.
    Where another callback uses gradients and says so (``uses_gradients = True``, as
    :class:`~lightning_vram.MicroBatching`), parameters step after the backward, one at a time, with a warning.

    ``keep_gradients=False`` keeps none over a window either: moments of Adam or AdamW take each gradient in as it comes
    (Adam accumulation), which is approximate. The first moment is that of the plain run; the second has the sum of
    squares of micro-batches in the place of the square of their sum. On one device, without clipping and a
    ``GradScaler``.

    Args:
        max_norm: With ``Trainer(gradient_clip_val=...)`` by norm: ``"two-pass"`` runs each backward twice over the same
            graph, first for the norm, then with the steps, which is exact; ``"previous"`` clips by the norm that the
            gradients of the step before had, before they were clipped, which is approximate. The first step, which has
            none before it, keeps all gradients and is exact. ``None`` refuses such clipping. With a ``GradScaler``,
            clipped or not, it has to be ``"two-pass"``: the first backward tells whether gradients are finite, the
            second runs if they are. With neither ignored.
        keep_gradients: Whether gradients add up in an accumulation, as usual; else they are freed in each backward.

    Raises:
        TypeError: If ``max_norm`` is no text, or ``keep_gradients`` no bool.
        ValueError: If ``max_norm`` is none of those above. Before training, if the optimizer cannot step one parameter
            at a time: it has to be one of ``torch.optim`` but LBFGS and SparseAdam; with ``keep_gradients=False`` Adam
            or AdamW.
        MisconfigurationException: In ``setup``, with manual optimization, clipping by norm without ``max_norm``,
            hooks that may use gradients, FSDP1, DeepSpeed, ``fsdp_offload``; with ``keep_gradients=False`` also with
            clipping, several devices and callbacks that use gradients. Before training, with a
            ``GradScaler`` without ``"two-pass"`` or under FSDP2, and what only the reducer of DDP can do.
        RuntimeError: In a backward, if a parameter gets a second gradient in one step, as by a second backward or
            checkpointing with ``use_reentrant=True``.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import OptimizerInBackward
        >>> trainer = pl.Trainer(callbacks=[OptimizerInBackward()], logger=False)
    """

    def __init__(self, max_norm: MaxNorm | None = None, *, keep_gradients: bool = True) -> None:
        if max_norm is not None and not isinstance(max_norm, str):
            raise TypeError(
                "OptimizerInBackward(max_norm) must be 'two-pass', 'previous' or None, got "
                f"{max_norm!r} of type {type(max_norm).__name__}: the largest norm is Trainer(gradient_clip_val=...)."
            )
        if max_norm is not None and max_norm not in get_args(MaxNorm):
            raise ValueError(f"OptimizerInBackward(max_norm) must be 'two-pass', 'previous' or None, got {max_norm!r}.")
        check_bool("OptimizerInBackward(keep_gradients)", keep_gradients)
        self.max_norm, self.keep_gradients = max_norm, keep_gradients
        self._steps: BackwardSteps | None = None
        self._shadows: list[Shadow] = []
        self._has_told = False
        self._previous_norm: float | None = None  # of the run before, or of a checkpoint

    @override
    def state_dict(self) -> dict[str, Any]:
        norm = self._last_norm()
        return {} if norm is None else {"previous_norm": norm}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._previous_norm = state_dict.get("previous_norm")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_steps": None, "_shadows": []}  # a copy is not part of any run

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        check_run(trainer, self.max_norm, keep_gradients=self.keep_gradients)
        self._previous_norm = None

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        # Once more: configure_model may have changed the module.
        check_run(trainer, self.max_norm, keep_gradients=self.keep_gradients)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_training(trainer, self.max_norm, keep_gradients=self.keep_gradients)
        self._has_told = False
        user = next(gradient_users(trainer), None)
        if user is not None:
            self._tell_of(user)
        elif trainer.accumulate_grad_batches > 1 and self.keep_gradients:
            rank_zero_info(
                "OptimizerInBackward keeps gradients until the last backward of each window of "
                f"{trainer.accumulate_grad_batches} batches."
            )
        limit = trainer.gradient_clip_val or None
        is_by_norm = clips_by_norm(trainer)
        clipping = Clipping(
            value=None if is_by_norm else limit,
            norm=limit if is_by_norm else None,
            by_previous=self.max_norm == "previous",
        )
        assert trainer.strategy.model is not None
        self._steps = BackwardSteps(
            trainer.strategy.model,
            clipping,
            may_be_early=partial(self._may_be_early, trainer) if user is None else None,
            keeps_gradients=self.keep_gradients,
        )
        if self._previous_norm is not None:
            self._steps.previous_norm = torch.tensor(self._previous_norm, device=pl_module.device)
        self._steps.attach(trainer.optimizers)
        plugin = trainer.precision_plugin
        self._shadows = [
            Shadow(plugin, "optimizer_step", partial(partial, self._optimizer_step, trainer)),
            Shadow(plugin, "backward", partial(partial, self._backward, trainer)),
            Shadow(plugin, "clip_gradients", partial(partial, self._clip_gradients)),
        ]
        if is_overridden("optimizer_zero_grad", pl_module):
            self._shadows.append(Shadow(pl_module, "optimizer_zero_grad", partial(partial, self._zero_grad)))

    def _zero_grad(self, inner: Callable[..., None], /, epoch: int, batch_idx: int, optimizer: Any) -> None:
        assert self._steps is not None
        self._steps.has_zeros |= leaves_zeros(partial(inner, epoch, batch_idx, optimizer), optimizer)

    def _may_be_early(self, trainer: pl.Trainer, closure: Any) -> bool:
        user = why_not_early(trainer, closure)
        if user is not None and not self._has_told:
            self._tell_of(user)
        return user is None

    def _tell_of(self, user: str) -> None:
        self._has_told = True
        rank_zero_warn(
            "OptimizerInBackward steps after the backward, one parameter at a time, and all gradients are in memory at "
            f"once: {user} may use them until then."
        )

    def _backward(self, trainer: pl.Trainer, inner: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """Stand in for the backward of the precision plugin, between its hooks."""
        assert self._steps is not None
        backward = partial(inner, *args, **kwargs)
        if self._steps.needs_two:
            self._steps.run_twice(backward)
        else:
            self._steps.run_once(backward, is_last=not is_accumulating(trainer.fit_loop.epoch_loop))

    def _optimizer_step(
        self, trainer: Any, inner: Callable[..., Any], /, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand in for the step of the precision plugin, which with a scaler runs the backward before the step."""
        assert self._steps is not None
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # it may end in the midst of a run
        if scaler is None or not scaler.is_enabled():
            return inner(optimizer, *args, **kwargs)
        with self._steps.scaled(optimizer, scaler, kwargs["closure"]):
            return inner(optimizer, *args, **kwargs)

    def _clip_gradients(self, inner: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        assert self._steps is not None
        if self._steps.leaves_clipping():
            inner(*args, **kwargs)

    def _last_norm(self) -> float | None:
        norm = None if self._steps is None else self._steps.previous_norm
        return self._previous_norm if norm is None else float(norm)

    @override
    def _undo(self) -> None:
        for shadow in reversed(self._shadows):
            shadow.remove()
        if self._steps is not None:
            self._previous_norm = self._last_norm()
            self._steps.let_go()
        self._steps, self._shadows = None, []
