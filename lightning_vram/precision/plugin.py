"""Train in 16 bit where that is enough: right about scaled gradients, and with less memory."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.argument_checks import check_bool
from lightning_vram.core.gradients.clipping import clip_gradient_norm
from lightning_vram.core.layers.patterns import LayerPattern
from lightning_vram.core.surgery.held_setting import without_fast_path
from lightning_vram.precision.arguments import (
    check_arguments,
    check_combination,
    refuse_callbacks,
    refuse_check,
    refuse_second_run,
    refuse_strategy,
)
from lightning_vram.precision.averages import list_averages
from lightning_vram.precision.choice import DTYPES, Choice, check_choice, resolve_precision
from lightning_vram.precision.module_changes import ModuleChanges, Settings
from lightning_vram.precision.overflow_watch import OnLimit
from lightning_vram.precision.run import PrecisionRun, end_dead_runs
from lightning_vram.precision.scaled import ScaledPrecision
from lightning_vram.precision.scaled_steps import ScaledSteps
from lightning_vram.private_names.lightning.strategies import call_after_closure

Parameters = Literal["fp32", "bf16+master", "bf16+split", "bf16+kahan", "bf16+stochastic"]


_OVERWRITTEN = "modified by an inplace operation", "BFloat16Type"  # in an error of autograd


class LeanMixedPrecision(ScaledPrecision):
    """Compute in bfloat16 or float16 where that is enough, and keep the rest in float32.

    Without further arguments results are those of ``Trainer(precision="bf16-mixed")`` or ``"16-mixed"`` to the bit,
    where Lightning's are right. Different from there:

    - Gradients are unscaled before ``on_before_optimizer_step``, before automatic clipping, and before
      ``self.clip_gradients`` of manual optimization (https://github.com/Lightning-AI/pytorch-lightning/issues/18089).
    - Optimizers that are ``fused=True`` may be clipped.
    - Optimizers that step after one backward see one loss scale, which moves before the next one; gradients that are
      kept for a later step move with it. It does not matter whether the user's code calls the scaler itself.
    - A step whose gradients overflowed is skipped on all ranks, counted, logged (``vram/overflow_steps``,
      ``vram/loss_scale``), and the learning rate waits for the next one.
    - Neither the backward nor the optimizer runs under autocast, in manual optimization either.
    - A weight that the first step used several times is cast once in each, as long as that copy is alive anyway.

    With ``parameters="bf16+..."`` weights are in bfloat16 during a fit, but those of ``fp32_modules`` and of norms;
    checkpoints and the module after the fit hold what the optimizer knows of them, in the type that they had. So a
    checkpoint can be resumed with other ``parameters`` or without this plugin. Parameters that are frozen are in
    bfloat16, too. Gradients are in bfloat16, also while they are accumulated. A hook that calls the module, or a direct
    part of it, gets what a step computes, in float32.

    Args:
        precision: ``"bf16"``, ``"fp16"`` with a dynamic loss scale, or ``"auto"``: bf16 where the hardware computes in
            it, else fp16.
        fp32_modules: Modules that run in float32: class names, module names, globs over module names, or classes, as
            for ``ActivationCheckpointing(layers)``. What comes in is cast to float32, what goes out back to 16 bit;
            scalars, such as losses, stay.
        low_precision_norms: Keep outputs of layer and RMS norms in 16 bit, which autocast makes float32. They are
            computed in float32 inside. Changes results by roundings.
        recast_in_backward: Keep no 16-bit copy of a weight for the backward, but make it again there. Linear layers,
            convolutions and ``nn.MultiheadAttention``; the same gradients to the bit.
        parameters: How parameters are kept, all with an optimizer that steps in float32. ``"fp32"``; ``"bf16+master"``:
            bfloat16, and in float32 for the optimizer; ``"bf16+split"``: bfloat16, and the 16 bits it lacks, exact as
            well (of a half between two, the forward sees the one away from zero, where master and autocast take the
            even one); ``"bf16+kahan"``: with a bfloat16 remainder; ``"bf16+stochastic"``: rounded at random, without
            one. The last two keep states of the optimizer in bfloat16. Bytes per parameter: see the README beside.
        check_updates: Log ``vram/lost_updates``: the share of updates, where logs are due, that leave weights as they
            are kept. For ``"bf16+kahan"`` and ``"bf16+stochastic"``, which is right on average; the others lose none.
        hold_lr_on_overflow: Schedules that go by steps do not count those that were skipped (automatic optimization).
        max_consecutive_overflows: So many skipped steps in a row end the run; ``None`` never does.
        on_overflow_limit: What happens then: an ``"error"``, or the run goes on in ``"bf16"`` or ``"fp32"``.
        scaler: For fp16, one with other settings than PyTorch's.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a value is unknown or arguments contradict each other; when a run is set up, if patterns match
            nothing, weights are in 16 bit already and the optimizer would lose most updates, or it cannot step lean
            parameters.
        MisconfigurationException: When a run is set up, if the device has no such autocast, with DeepSpeed, with LBFGS
            in float16, with lean parameters and ``StochasticWeightAveraging`` or ``ModelPruning``, or if the module has
            grown since ``WeightAveraging`` copied it, and inside of a run of another trainer that has this plugin.
        FloatingPointError: After too many overflows in a row.

    Attributes:
        overflow_steps: Optimizer steps that were skipped so far.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import LeanMixedPrecision
        >>> trainer = pl.Trainer(plugins=[LeanMixedPrecision("bf16", recast_in_backward=True)], logger=False)
    """

    def __init__(  # noqa: PLR0913 - set by name in configuration files
        self,
        precision: Choice = "auto",
        *,
        fp32_modules: LayerPattern | Sequence[LayerPattern] = (),
        low_precision_norms: bool = False,
        recast_in_backward: bool = False,
        parameters: Parameters = "fp32",
        check_updates: bool = False,
        hold_lr_on_overflow: bool = True,
        max_consecutive_overflows: int | None = 30,
        on_overflow_limit: OnLimit = "error",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        choice = check_choice(precision)
        check_arguments(fp32_modules, parameters, max_consecutive_overflows, on_overflow_limit, scaler)
        check_bool("LeanMixedPrecision(low_precision_norms)", low_precision_norms)
        check_bool("LeanMixedPrecision(recast_in_backward)", recast_in_backward)
        check_bool("LeanMixedPrecision(hold_lr_on_overflow)", hold_lr_on_overflow)
        check_bool("LeanMixedPrecision(check_updates)", check_updates)
        check_combination(choice, parameters, scaler)
        refuse_check(parameters, check_updates=check_updates)
        patterns = (fp32_modules,) if isinstance(fp32_modules, str | type) else tuple(fp32_modules)
        self.settings = Settings(patterns, low_precision_norms, recast_in_backward, parameters, check_updates)
        self._holds_lr = hold_lr_on_overflow
        super().__init__(choice, max_consecutive_overflows, on_overflow_limit, scaler)

    def __repr__(self) -> str:
        """As it is told apart from others in messages of Lightning."""
        return f"{type(self).__name__}({self.precision!r})"

    # --- set up and undo ---

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, pl.LightningModule)
        trainer = module.trainer
        if self._run is not None:
            refuse_second_run(self._run.trainer, trainer)
        self.teardown()  # a run whose end was cut short
        end_dead_runs()
        refuse_strategy(trainer)
        self.device = trainer.strategy.root_device.type
        precision = resolve_precision(self._choice, self.device)
        check_combination(precision, self.settings.parameters, self._given_scaler if self._choice else None)
        is_training = trainer.state.fn == TrainerFn.FITTING
        if is_training and self.settings.is_lean:
            refuse_callbacks(trainer, self.settings.parameters)
            list_averages(trainer, module)  # refuses a module that has grown
        changes = ModuleChanges(module, self.device, self.settings, is_training=is_training)
        self._run = PrecisionRun(module, trainer, changes)
        if is_training:
            self._has_fallen_back, self._ended = False, {}
            self._overflows.num_consecutive = 0
        if not self._has_fallen_back:  # else evaluations compute as the fit did in the end
            self._start_in(precision, self._run if is_training else None)
        return module

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if self._run is not None and self._run.changes.is_training:
            self._run.connect(optimizers, lr_schedulers, holds_lr=self._holds_lr)
        return model, optimizers, lr_schedulers

    @override
    def teardown(self) -> None:
        if self._run is not None:
            if self._run.changes.is_training:
                self._ended = self._run.state_dict()
            self._run.remove()
            self._run = None

    # --- a step ---

    @override
    def autocast_context_manager(self) -> torch.autocast:
        dtype = DTYPES.get(self.precision)
        # Its own cache keeps copies of all weights under no_grad and in checkpointed layers.
        return torch.autocast(self.device, dtype=dtype, enabled=dtype is not None, cache_enabled=False)

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        is_skipped = self.settings.changes_layers and self.device != "cuda"
        calls = self._run.changes.calls if self._run is not None else None
        with (
            self.autocast_context_manager(),
            without_fast_path() if is_skipped else nullcontext(),
            calls.in_step() if calls is not None else nullcontext(),
        ):
            yield

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        with self._training_step():
            yield
        if self._run is not None:
            self._run.warn_of_idle_islands()

    @contextmanager
    def _training_step(self) -> Generator[None, None, None]:
        steps = self._run.steps if self._run is not None and not self._run.module.automatic_optimization else None
        if steps is not None:
            steps.is_deferring = True
        try:
            with self.forward_context():
                yield
        finally:
            if steps is not None:
                steps.is_deferring = False
        if steps is not None:
            steps.end()

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        if self._steps is not None:
            tensor = self._steps.scale(tensor)
        return Precision.pre_backward(self, tensor, module)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        with self._without_autocast():  # it is on in manual optimization, whose backward is part of the training step
            try:
                super().backward(tensor, model, optimizer, *args, **kwargs)
            except RuntimeError as error:
                if not self.settings.is_lean or not all(part in str(error) for part in _OVERWRITTEN):
                    raise
                raise RuntimeError(
                    f"LeanMixedPrecision(parameters={self.settings.parameters!r}): if an optimizer has stepped since "
                    "this forward, it has overwritten the 16-bit weights that the backward needs. Step after all "
                    f'backwards of a forward, or use parameters="fp32". PyTorch says: {error}'
                ) from error

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        assert self._run is not None
        closure = self._under_present_autocast(closure)
        with self._without_autocast():
            if self._run.steps is not None:
                return self._scaled_step(self._run, self._run.steps, optimizer, closure, **kwargs)
            result = Precision.optimizer_step(self, optimizer, model=model, closure=closure, **kwargs)
        self._run.log_lost_updates()
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val > 0 and self._steps is not None:
            self._steps.unscale(optimizer)
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.settings.is_lean:
            clip_gradient_norm(self.main_params(optimizer), clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)

    def _scaled_step(
        self, run: PrecisionRun, steps: ScaledSteps, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()
        if run.module.automatic_optimization and result is None and not _has_gradients(optimizer):
            call_after_closure(self, run.module, optimizer)
            return None
        steps.unscale(optimizer)
        call_after_closure(self, run.module, optimizer)
        output = steps.step(optimizer, **kwargs)
        return result if result is not None else output

    def _without_autocast(self) -> AbstractContextManager[Any]:
        if not torch.is_autocast_enabled(self.device):
            return nullcontext()
        return torch.autocast(self.device, enabled=False)

    def _under_present_autocast(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of manual optimization, run by the optimizer, holds a forward."""
        if not torch.is_autocast_enabled(self.device):
            return closure
        return partial(_run_under, self.autocast_context_manager(), closure)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _run_under(context: AbstractContextManager[Any], run: Callable[[], Any]) -> Any:
    with context:
        return run()
