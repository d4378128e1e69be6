"""Step each parameter in the backward as soon as its gradient is complete, and free the gradient.

Only the largest gradient is in memory, instead of all of them. It costs one optimizer call per parameter. It saves
little during gradient accumulation, which keeps gradients until the last micro-batch, unless ``keep_gradients=False``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_choice
from lightning_vram.callbacks import hook_points
from lightning_vram.core.gradients import why_reducer_is_needed
from lightning_vram.core.patching import MethodPatch
from lightning_vram.optimizers.in_backward import BackwardSteps, Clipping
from lightning_vram.private_names.lightning import is_accumulating

NAME = "OptimizerInBackward"
_NEEDS_ALL = (
    "OptimizerInBackward(keep_gradients=False) does not work with {}, which needs the gradients of all micro-batches "
    "at once: use {}, or keep_gradients=True."
)


def check_run(trainer: pl.Trainer, max_norm: str | None, *, keep_gradients: bool) -> None:
    """Refuse what cannot work, in the ``setup`` hooks, before anything has changed."""
    hook_points.refuse_moved_parameters(NAME, trainer, "it steps")
    if hasattr(trainer.strategy, "moments"):  # of fsdp_offload
        raise MisconfigurationException(
            f"{NAME} does not work with {type(trainer.strategy).__name__}, which steps itself as gradients become "
            f"ready: leave {NAME} out."
        )
    if not trainer.lightning_module.automatic_optimization:
        raise MisconfigurationException(
            f"{NAME} does not work with manual optimization: it cannot see which backward belongs to which step. Set "
            "automatic_optimization=True."
        )
    _check_hooks(trainer)
    if not keep_gradients:
        if trainer.gradient_clip_val:
            raise MisconfigurationException(_NEEDS_ALL.format("gradient_clip_val", "no clipping"))
        user = next((type(one).__name__ for one in trainer.callbacks if hook_points.uses_gradients(one)), None)  # type: ignore[attr-defined]
        if user is not None:
            raise MisconfigurationException(_NEEDS_ALL.format(user, f"no {user}"))
        if not isinstance(trainer.strategy, SingleDeviceStrategy):
            raise MisconfigurationException(_NEEDS_ALL.format(type(trainer.strategy).__name__, "a single device"))
    if clips_by_norm(trainer) and max_norm is None:
        raise MisconfigurationException(
            f"{NAME} cannot clip by norm, which needs all gradients at once, got gradient_clip_val="
            f"{trainer.gradient_clip_val}: use max_norm='two-pass' (exact; runs each backward twice), "
            "max_norm='previous' (by the norm of the step before) or gradient_clip_algorithm='value'."
        )


def clips_by_norm(trainer: pl.Trainer) -> bool:
    """Whether the Trainer clips gradients by their common norm."""
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE


def check_training(trainer: pl.Trainer, max_norm: str | None, *, keep_gradients: bool) -> None:
    """Refuse what shows only once the module is wrapped: a scaler, and what only DDP's reducer can do."""
    if hook_points.is_scaled(trainer) and not keep_gradients:
        raise MisconfigurationException(_NEEDS_ALL.format("a GradScaler", "precision='bf16-mixed'"))
    if hook_points.is_scaled(trainer) and max_norm != "two-pass":
        raise MisconfigurationException(
            f"{NAME}(max_norm={max_norm!r}) does not work with a GradScaler, which checks all gradients before any "
            "step: use max_norm='two-pass' (exact; runs each backward twice) or "
            "precision='bf16-mixed'."
        )
    if hook_points.is_scaled(trainer) and isinstance(trainer.strategy, ModelParallelStrategy):
        raise MisconfigurationException(
            f"{NAME} does not work with a GradScaler under {type(trainer.strategy).__name__}: use "
            "precision='bf16-mixed', 'ddp' or a single device."
        )
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return
    reason = "find_unused_parameters=True" if model.find_unused_parameters else why_reducer_is_needed(model)
    if reason is not None:
        raise MisconfigurationException(
            f"{NAME} does not work with {reason}: it steps when DDP has reduced a bucket. Use strategy='ddp' without "
            "that option."
        )


def _zero_gradients(zero: Callable[..., None], /, epoch: int, batch_idx: int, optimizer: Any) -> None:
    """Zero gradients, among them a probe; refuse if that stays, or becomes zeros, which would be stepped with."""
    parameters = (one for group in optimizer.param_groups for one in group["params"])
    probe = min((one for one in parameters if one.requires_grad and one.grad is None), key=torch.numel, default=None)
    if probe is not None:
        probe.grad = torch.ones_like(probe)
    zero(epoch, batch_idx, optimizer)
    if probe is not None and probe.grad is not None:
        probe.grad = None
        raise MisconfigurationException(
            f"{NAME} does not work with an optimizer_zero_grad that leaves gradients or zeros: they are used up by "
            f"then. Call optimizer.zero_grad() in there, or leave {NAME} out."
        )


def _check_hooks(trainer: pl.Trainer) -> None:
    module = trainer.lightning_module
    for owner in (module, *trainer.callbacks):  # type: ignore[attr-defined]
        hook, name = next(hook_points.own_gradient_hooks(owner), None), type(owner).__name__
        if hook is not None:
            way_out = (
                "Remove it" if owner is module else f"Set uses_gradients = False in {name} if it leaves them alone"
            )
            raise MisconfigurationException(
                f"{NAME} does not work with {name}.{hook}, which may use gradients: they are used up by then. "
                f"{way_out}, or leave {NAME} out."
            )


MaxNorm = Literal["two-pass", "previous"]


class OptimizerInBackward(hook_points.FitTechnique):
    """Step each parameter during the backward, and free its gradient at once. Other name: fused backward.

    The optimizer is the object that ``configure_optimizers`` returned, with its parameter groups, schedulers, hooks and
    state. Weights and checkpoints are bitwise identical to the run without this callback, and load with and without it.
    A parameter that is used several times steps once, when its gradient is complete.

    Clipping by value is exact. Clipping by norm needs all gradients before the first step; ``max_norm`` chooses the
    norm. Gradient accumulation is exact: gradients add up until the last micro-batch, whose backward steps, so they
    stay in memory until then. Under DDP parameters step when their bucket is reduced, under FSDP2
    (``ModelParallelStrategy``) when their shard is.

    After a step parameters have no ``grad``. A backward that fails has already stepped some parameters. If another
    callback declares ``uses_gradients = True``, as :class:`~lightning_vram.MicroBatching` does, parameters step after
    the backward, one at a time, with a warning.

    Args:
        max_norm: How to clip with ``Trainer(gradient_clip_val=...)`` by norm. ``"two-pass"`` runs each backward twice
            over the same graph, first for the norm, then for the steps: exact. ``"previous"`` clips by the unclipped
            norm of the previous step: approximate; the first step keeps all gradients and is exact. ``None`` refuses
            clipping by norm. A ``GradScaler`` needs ``"two-pass"``, even without clipping: the first backward checks
            that all gradients are finite, and the second runs only then. Without clipping by norm and ``GradScaler``
            the argument has no effect.
        keep_gradients: ``False`` frees gradients in each backward of a gradient accumulation: Adam or AdamW adds them
            to its moments (Adam accumulation, arXiv 2305.19982). The first moment is exact; the second sums the squares
            of micro-batches instead of squaring their sum, so training is approximate. One device only, without
            clipping, ``GradScaler`` and callbacks that use gradients.

    Raises:
        TypeError: If ``max_norm`` is not a string, or ``keep_gradients`` not a bool.
        ValueError: If ``max_norm`` is unknown. Before training, if the optimizer cannot step one parameter at a time:
            it must be one of ``torch.optim`` except LBFGS and SparseAdam; with ``keep_gradients=False`` Adam or AdamW.
        MisconfigurationException: In ``setup``, with manual optimization, clipping by norm without ``max_norm``, hooks
            that may use gradients, FSDP1, DeepSpeed or ``fsdp_offload``; with ``keep_gradients=False`` also with
            clipping, several devices and callbacks that use gradients. Before training, with a ``GradScaler`` without
            ``"two-pass"`` or under FSDP2, and with DDP options that need its own reducer.
        RuntimeError: In a backward, if a parameter gets a second gradient in one step, for example from a second
            backward or from checkpointing with ``use_reentrant=True``.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import OptimizerInBackward
        >>> trainer = pl.Trainer(callbacks=[OptimizerInBackward()], logger=False)
    """

    def __init__(self, max_norm: MaxNorm | None = None, *, keep_gradients: bool = True) -> None:
        check_choice("OptimizerInBackward(max_norm)", max_norm, (*get_args(MaxNorm), None))
        check_bool("OptimizerInBackward(keep_gradients)", keep_gradients)
        self.max_norm, self.keep_gradients = max_norm, keep_gradients
        self._steps: BackwardSteps | None = None
        self._patches: list[MethodPatch] = []
        self._has_warned = False
        self._previous_norm: float | None = None  # of the run before, or of a checkpoint

    @override
    def state_dict(self) -> dict[str, Any]:
        norm = self._last_norm()
        return {} if norm is None else {"previous_norm": norm}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._previous_norm = state_dict.get("previous_norm")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_steps": None, "_patches": []}  # a copy is not part of any run

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
        self._has_warned = False
        user = next(hook_points.gradient_users(trainer), None)
        if user is not None:
            self._warn_of(user)
        elif trainer.accumulate_grad_batches > 1 and self.keep_gradients:
            rank_zero_info(
                "OptimizerInBackward keeps gradients until the last micro-batch of each optimizer step: "
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}."
            )
        limit = trainer.gradient_clip_val or None
        value, norm = (None, limit) if clips_by_norm(trainer) else (limit, None)
        assert trainer.strategy.model is not None
        self._steps = BackwardSteps(
            trainer.strategy.model,
            Clipping(value, norm, by_previous=self.max_norm == "previous"),
            may_be_early=partial(self._may_be_early, trainer) if user is None else None,
            keeps_gradients=self.keep_gradients,
        )
        if self._previous_norm is not None:
            self._steps.previous_norm = torch.tensor(self._previous_norm, device=pl_module.device)
        self._steps.attach(trainer.optimizers)
        plugin = trainer.precision_plugin
        self._patches = [
            MethodPatch(plugin, "optimizer_step", partial(partial, self._optimizer_step, trainer)),
            MethodPatch(plugin, "backward", partial(partial, self._backward, trainer)),
            MethodPatch(plugin, "clip_gradients", partial(partial, self._clip_gradients)),
        ]
        if is_overridden("optimizer_zero_grad", pl_module):
            self._patches.append(MethodPatch(pl_module, "optimizer_zero_grad", partial(partial, _zero_gradients)))

    def _may_be_early(self, trainer: pl.Trainer, closure: Any) -> bool:
        user = hook_points.why_not_early(trainer, closure)
        if user is not None and not self._has_warned:
            self._warn_of(user)
        return user is None

    def _warn_of(self, user: str) -> None:
        self._has_warned = True
        rank_zero_warn(
            "OptimizerInBackward steps after the backward, one parameter at a time, and all gradients are in memory at "
            f"once, because {user} may use them."
        )

    def _backward(self, trainer: pl.Trainer, inner: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """Replaces the backward of the precision plugin, between its hooks."""
        assert self._steps is not None
        self._steps.run(partial(inner, *args, **kwargs), is_last=not is_accumulating(trainer.fit_loop.epoch_loop))

    def _optimizer_step(
        self, trainer: Any, inner: Callable[..., Any], /, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """Replaces the step of the precision plugin, which with a scaler runs the backward before the step."""
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
        for patch in reversed(self._patches):
            patch.remove()
        if self._steps is not None:
            self._previous_norm = self._last_norm()
            self._steps.let_go()
        self._steps, self._patches = None, []
