"""What the plugin changes from the setup of a run to its teardown: module, averages, optimizers, schedules."""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

from lightning_vram.core.layers import LayerPattern, select_layers
from lightning_vram.core.patching import (
    MethodPatch,
    Swaps,
    compiled_backward_without_autocast,
    has_own_forward,
    plain_class_forward,
    replace_by,
)
from lightning_vram.core.tensors.properties import cast_where
from lightning_vram.optimizers.averages import LeanAverage
from lightning_vram.optimizers.bf16_weights import LeanParameters, iterate_computing, refuse_lost_updates
from lightning_vram.optimizers.moment_forms import UpdateCheck
from lightning_vram.optimizers.step_round import iterate_parameters
from lightning_vram.private_names import lightning as private_lightning
from lightning_vram.private_names.torch import NormBase
from lightning_vram.techniques.mixed_precision import Float32Islands, LossScaling, WeightCasts, keep_norms_low
from lightning_vram.techniques.quantize_frozen_weights import read_weights_as


@dataclass(frozen=True)
class Settings:
    """Arguments of the plugin that change the module."""

    fp32_modules: tuple[LayerPattern, ...] = ()
    low_precision_norms: bool = False  # whether outputs of norms stay in 16 bits
    recast_in_backward: bool = False  # whether weights are cast again in the backward
    parameters: str = "fp32"  # how they are stored
    check_updates: bool = False  # whether to count lost updates

    @property
    def is_lean(self) -> bool:
        """Whether parameters are stored in 16 bits."""
        return self.parameters != "fp32"


def _is_rounded(value: Tensor, parameter: Tensor) -> bool:
    """Whether ``parameter`` holds ``value``, except for rounding to bfloat16."""
    present, eps = parameter.detach().float(), torch.finfo(torch.bfloat16).eps
    is_alike = value.shape == present.shape
    return is_alike and torch.allclose(present, value.to(present), rtol=eps, atol=0.0, equal_nan=True)


def _after_any_step(casts: "ref[WeightCasts]", optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    living = casts()
    if living is not None:  # parameters without a gradient were not stepped
        living.after_step(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def _find_islands(module: nn.Module, patterns: Sequence[LayerPattern]) -> dict[nn.Module, str]:
    """Return the modules that match, with their names, without those inside others."""
    if not patterns:
        return {}
    try:
        return {layer.module: layer.name for layer in select_layers(module, patterns).layers}
    except ValueError as error:
        raise ValueError("LeanMixedPrecision: " + str(error).replace("layers=", "fp32_modules=", 1)) from None


def list_averages(trainer: pl.Trainer | None, module: nn.Module) -> list[tuple[WeightAveraging, AveragedModel]]:
    """List ``WeightAveraging`` callbacks and their averages; refuse a module that has grown since it was copied."""
    found = []
    for callback in private_lightning.averaging_callbacks(trainer):
        average = private_lightning.average_of(callback)
        assert average is not None
        counts = [len(list(one.parameters())) for one in (average.module, module)]
        if counts[0] != counts[1]:
            raise MisconfigurationException(
                f"{type(callback).__name__} copied the module when it had {counts[0]} parameters; now it has "
                f"{counts[1]}. Put callbacks that change the module before it in Trainer(callbacks=...)."
            )
        found.append((callback, average))
    return found


def is_logging(module: pl.LightningModule, *, always: bool = False) -> bool:
    """Whether values of this step are logged; ``always``: whether they could be."""
    trainer = module.trainer
    is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    is_due = is_last or private_lightning.logs_are_due(trainer) or trainer.fast_dev_run  # type: ignore[attr-defined]
    return not trainer.barebones and private_lightning.running_results(trainer) is not None and bool(is_due or always)


def log_of_step(module: pl.LightningModule, values: Mapping[str, float | Tensor]) -> None:
    """Log values of a step, where :func:`is_logging`."""
    # Under manual optimization a step may end in a hook that Lightning lets no values be logged from.
    with private_lightning.logging_from(module, "optimizer_step"):
        for name, value in values.items():
            module.log(name, value, on_step=True, on_epoch=False, batch_size=1)


def refuse_optimizers(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that do not work with a loss scale."""
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise MisconfigurationException(
            "LeanMixedPrecision(precision='fp16') cannot skip a step of LBFGS that overflows: use precision='bf16'."
        )
    counts = Counter(parameter for one in optimizers for parameter in set(iterate_parameters(one)))
    for name, parameter in module.named_parameters():
        if counts[parameter] > 1:
            raise MisconfigurationException(
                f"LeanMixedPrecision(precision='fp16') needs one optimizer for {name!r}, or precision='bf16'."
            )


# Key of the module's own weights in a checkpoint of Lightning's WeightAveraging, which has the average as its weights.
_CURRENT = "current_model_state"


class PrecisionRun:
    """One run, with all that it changes, and the undo; if not ``is_training``, only what changes results."""

    def __init__(
        self, module: pl.LightningModule, trainer: pl.Trainer, settings: Settings, *, is_training: bool
    ) -> None:
        self.module, self.trainer, self.settings, self.is_training = module, trainer, settings, is_training
        self.lean: LeanParameters | None = None
        self.scaling: LossScaling | None = None  # in float16, while it trains
        self.has_skipped = self.has_warned = False  # the last optimizer step overflowed; a training step is over
        self.is_in_step = False
        self._undo_scaling = ExitStack()
        is_lean = self.is_training and self.settings.is_lean
        averages = list_averages(self.trainer, self.module) if is_lean else []
        with ExitStack() as undo:
            self._island_names = _find_islands(self.module, self.settings.fp32_modules)
            self._islands = Float32Islands(self._island_names, self.device_type)
            undo.callback(self._islands.remove)
            # the islands, and what is in them
            self._inside = {part for island in self._island_names for part in island.modules()}
            if self.settings.low_precision_norms:
                undo.callback(keep_norms_low(self.module, self.device_type, skip=self._inside).remove)
            if is_lean:
                self._store_in_bf16(undo, averages)
            if self.is_training:
                undo.enter_context(compiled_backward_without_autocast())
            self._undo = undo.pop_all()

    def _store_in_bf16(self, undo: ExitStack, averages: list[tuple[WeightAveraging, AveragedModel]]) -> None:
        # All but those of fp32 islands, computed weights, and kernels that need float32; bf16 ones are never exempt.
        kinds = (NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.Bilinear)
        norms = (one for one in self.module.modules() if isinstance(one, kinds) or type(one).__name__.endswith("Norm"))
        exempt = {*self._inside, *norms, *iterate_computing(self.module)}
        in_float32 = {parameter for part in exempt for parameter in part.parameters(recurse=False)}
        chosen = [p for p in self.module.parameters() if p not in in_float32 or p.dtype is torch.bfloat16]
        self.lean = lean = LeanParameters(chosen, self.settings.parameters, self._named_parameters())
        undo.callback(lean.restore)
        undo.callback(read_weights_as(self.module, torch.bfloat16, skip=self._inside))
        calls = Swaps("_lightning_vram_between_steps")
        undo.callback(calls.remove)
        for part in (self.module, *self.module.children()):
            is_called = plain_class_forward(part) is not nn.Module.forward or has_own_forward(part)
            if is_called and not isinstance(part, torch.jit.ScriptModule):
                calls.add(part, self, _forward_between_steps)
        for callback, whole in averages:
            average = LeanAverage(whole, self.module, lean)
            undo.callback(average.remove)
            undo.callback(MethodPatch(callback, private_lightning.SWAP_WITH_AVERAGE, replace_by(average.swap)).remove)
            undo.callback(MethodPatch(callback, private_lightning.PUT_AVERAGE, replace_by(average.put)).remove)
        if self.settings.check_updates:
            lean.check = UpdateCheck(partial(is_logging, self.module))

    @property
    def device_type(self) -> str:
        """Type of device that the run computes on."""
        return self.trainer.strategy.root_device.type

    @contextmanager
    def in_step(self) -> Generator[None, None, None]:
        """Mark a step, which controls autocast itself."""
        outer, self.is_in_step = self.is_in_step, True
        try:
            yield
        finally:
            self.is_in_step = outer

    def connect(
        self,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[LRSchedulerConfig],
        scaler: GradScaler | None,
        on_update: Callable[[int], None],
        *,
        holds_lr: bool,
    ) -> None:
        """Let the optimizers of a fit step the stored weights, or refuse those that cannot; register schedules."""
        optimizers = [one for one in optimizers if not isinstance(one, private_lightning.MockOptimizer)]
        if scaler is not None:
            refuse_optimizers(self.module, optimizers)
        if self.lean is None:
            refuse_lost_updates(optimizers)
        else:
            self._attach(self.lean, optimizers)
        if self.settings.recast_in_backward:
            # Swap classes only now: code that selects layers by their type has made its parameter groups.
            casts = WeightCasts(self.module, self.device_type, skip=self._inside)
            self._undo.callback(casts.remove)
            # Of all optimizers: some are made in the midst of training, and steps do not all pass the plugin.
            self._undo.callback(register_optimizer_step_post_hook(partial(_after_any_step, ref(casts))).remove)
        if scaler is not None:
            # One rank may have an overflow in sharded or unreduced gradients.
            over_ranks = partial(self.trainer.strategy.reduce, reduce_op="sum") if self.trainer.world_size > 1 else None
            self.scaling = LossScaling(scaler, optimizers, over_ranks, on_update)
            for name, call in (("scale", self.scaling.scale), ("unscale_", self.unscale)):
                self._undo_scaling.callback(MethodPatch(scaler, name, replace_by(call)).remove)
            self._undo.callback(self.end_scaling)
            if holds_lr and self.module.automatic_optimization:
                by_step = [config.scheduler for config in schedules if config.interval == "step"]
                patch = MethodPatch(self.module, "lr_scheduler_step", partial(partial, self._step_schedule, by_step))
                self._undo.callback(patch.remove)

    def _step_schedule(
        self, by_step: list[Any], inner: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any
    ) -> None:
        """Replace ``lr_scheduler_step``, which is ``inner``: Lightning would count steps that were skipped."""
        if not (self.has_skipped and scheduler in by_step):
            inner(scheduler, *args, **kwargs)

    def _attach(self, lean: LeanParameters, optimizers: Sequence[Optimizer]) -> None:
        lean.attach(optimizers)
        strategy = self.trainer.strategy
        if self.trainer.world_size > 1:  # DDP has broadcast the bfloat16 weights of the first replica
            for rest in lean.rests():
                on_device = rest.to(strategy.root_device)
                torch.distributed.broadcast(on_device.view(torch.uint8), 0)  # not all backends know all integers
                rest.copy_(on_device)
        # All checkpoints get their weights from here, also those with weights only.
        name = "lightning_module_state_dict"
        self._undo.callback(MethodPatch(strategy, name, lambda inner: lambda: lean.full_state(inner())).remove)

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of ``optimizer``, which may be wrapped, if they are scaled."""
        if self.scaling is not None:
            # ``self.optimizers()`` of a LightningModule returns wrappers
            self.scaling.unscale(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)

    def end_scaling(self) -> None:
        """Continue without a scale. Calling it again does nothing."""
        self._undo_scaling.close()
        self.scaling = None

    def warn_of_idle_islands(self) -> None:
        """Warn once, after a training step, of ``fp32_modules`` that it did not call."""
        idle = [] if self.has_warned else [self._island_names[module] for module in self._islands.idle]
        self.has_warned = True
        if idle:
            rank_zero_warn(
                f"LeanMixedPrecision(fp32_modules): the first training step did not call {', '.join(idle)}. Name the "
                "module that reads their weights, for example nn.MultiheadAttention instead of its out_proj."
            )

    def remove(self) -> None:
        """Undo what was changed. Calling it again does nothing."""
        self._undo.close()

    def load_weights(self, checkpoint: Mapping[str, Any]) -> None:
        """Load weights exactly that were rounded on loading a checkpoint. Weights that user code changed stay."""
        if self.lean is None:
            return
        has_average = _CURRENT in checkpoint and private_lightning.averaging_callbacks(self.trainer)
        weights = checkpoint.get(_CURRENT if has_average else "state_dict", {})
        named, stored = self._named_parameters(), self.lean.parameters()
        found = {one: weights[name] for name, one in named.items() if one in stored and name in weights}
        self.lean.take({parameter: value for parameter, value in found.items() if _is_rounded(value, parameter)})

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters(remove_duplicate=False))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {} if self.lean is None else {"lean": {"num_steps": self.lean.num_steps}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        if self.lean is not None and "lean" in state:
            self.lean.num_steps = state["lean"]["num_steps"]


def _forward_between_steps(
    module: nn.Module, run: PrecisionRun, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Replace ``forward`` of a module with bf16 weights, and of its children: hooks call them without autocast."""
    if run.is_in_step or torch.is_autocast_enabled(run.device_type):
        return forward(*args, **kwargs)
    with torch.autocast(run.device_type, dtype=torch.bfloat16, cache_enabled=False):
        output = forward(*args, **kwargs)
    return cast_where(lambda leaf: isinstance(leaf, Tensor) and leaf.dtype is torch.bfloat16, torch.float32, output)
