"""The plugin: mixed-precision training in less memory, with correctly unscaled gradients."""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_choice, check_kind, check_positive_int
from lightning_vram.core.gradients import clip_gradient_norm
from lightning_vram.core.layers import LayerPattern, check_layers
from lightning_vram.core.patching import without_fast_path
from lightning_vram.memory.device.accelerators import current_kind, has_native_bf16
from lightning_vram.precision.run import PrecisionRun, Settings, is_logging, log_of_step
from lightning_vram.private_names.lightning import call_after_closure, is_searching_rate, refuse_callbacks
from lightning_vram.techniques.mixed_precision import LossScaling

Choice = Literal["auto", "bf16", "fp16", "bf16-mixed", "16-mixed"]  # of a user
Precision16 = Literal["bf16-mixed", "16-mixed"]  # Lightning's names
OnLimit = Literal["error", "bf16", "fp32"]
Parameters = Literal["fp32", "bf16+master", "bf16+split", "bf16+kahan", "bf16+stochastic"]

_PRECISIONS: dict[str, Precision16] = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_LIGHTNINGS = "MixedPrecision"
_OTHERS = ("LeanMixedPrecision", _LIGHTNINGS, "FSDPPrecision")  # Lightning keeps states by the name of the class
_REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "averages weights that bfloat16 has rounded: use WeightAveraging, or 'fp32'",
    "ModelPruning": "puts other parameters, in float32, and masks into the module: use 'fp32'",
}


class LeanMixedPrecision(MixedPrecision):
    """Train in bfloat16 or float16 mixed precision, in less memory than ``Trainer(precision="bf16-mixed")``.

    Without further arguments results are bitwise those of ``"bf16-mixed"`` or ``"16-mixed"``, with these fixes:

    - Gradients are unscaled before ``on_before_optimizer_step``, before automatic clipping, and before
      ``self.clip_gradients`` of manual optimization (https://github.com/Lightning-AI/pytorch-lightning/issues/18089).
    - ``fused=True`` optimizers may be clipped.
    - Optimizers that step after one backward share one loss scale, which changes before the next backward. Gradients
      of a later step are rescaled with it.
    - A step whose gradients overflow is skipped on all ranks and logged (``vram/overflow_steps``, ``vram/loss_scale``).
      Learning rate schedulers do not count it.
    - Neither the backward nor the optimizer runs under autocast, in manual optimization either.

    With ``parameters="bf16+..."`` weights and gradients are bfloat16 during a fit, frozen weights included; norms and
    ``fp32_modules`` stay float32. Checkpoints, and the module after the fit, hold full-precision weights in the dtype
    that the module had, so a run can be resumed with other ``parameters`` or without this plugin. Gradients are also
    accumulated in bfloat16. A hook that calls the module or a direct child gets float32 results.

    Args:
        precision: ``"bf16"``, ``"fp16"`` with a dynamic loss scale, or ``"auto"``: bf16 if the hardware supports it,
            otherwise fp16.
        fp32_modules: Modules that run in float32: class names, module names, globs over module names, or classes, as in
            ``ActivationCheckpointing(layers)``. Inputs are cast to float32, outputs back to 16 bits, except scalars
            such as losses.
        low_precision_norms: Store outputs of layer and RMS norms in 16 bits; autocast returns float32. They compute in
            float32 inside. Approximate.
        recast_in_backward: Save no 16-bit copies of weights for the backward; cast the weights again there. Exact. For
            linear layers, convolutions and ``nn.MultiheadAttention``.
        parameters: How weights are stored; the optimizer always steps in float32. Total bytes per parameter with AdamW
            in parentheses. ``"fp32"`` (16). ``"bf16+master"`` (16): bfloat16 plus float32 master weights.
            ``"bf16+split"`` (14): bfloat16 plus a 16-bit remainder, together the float32 weight; ties in the bfloat16
            half round away from zero, 1 in 131,072 weights. ``"bf16+kahan"`` (10): bfloat16 plus a bfloat16 remainder
            (Kahan summation). ``"bf16+stochastic"`` (8): bfloat16 with stochastic rounding. The last two store
            optimizer state in bfloat16.
        check_updates: Log ``vram/lost_updates``, the share of weight updates that rounding discards. For
            ``"bf16+kahan"`` and ``"bf16+stochastic"`` (which is right on average); the others lose none.
        hold_lr_on_overflow: Learning rate schedulers with ``interval="step"`` do not step after a skipped step. For
            automatic optimization.
        max_consecutive_overflows: Number of skipped steps in a row that ends the run. ``None``: no limit.
        on_overflow_limit: At that number, raise an ``"error"``, or continue in ``"bf16"`` or ``"fp32"``.
        scaler: A ``torch.amp.GradScaler`` with your own settings, for fp16. ``None``: PyTorch's defaults.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a value is unknown or arguments contradict each other. When a run is set up, if patterns match
            nothing, if trainable weights are 16-bit already and the optimizer would lose most updates, or if it cannot
            step bfloat16 weights.
        MisconfigurationException: When a run is set up, if the device does not support autocast to this precision, with
            DeepSpeed, in float16 with LBFGS or with optimizers that share parameters, with ``parameters="bf16+..."``
            and ``StochasticWeightAveraging`` or ``ModelPruning``, if the module has grown since ``WeightAveraging``
            copied it, or inside a run of another trainer that has this plugin.
        FloatingPointError: After ``max_consecutive_overflows`` overflows in a row.

    Attributes:
        overflow_steps: Number of optimizer steps skipped so far.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import LeanMixedPrecision
        >>> trainer = pl.Trainer(plugins=[LeanMixedPrecision("bf16", recast_in_backward=True)], logger=False)
    """

    precision: Any  # "32-true" after a fall-back

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
        scaler: GradScaler | None = None,
    ) -> None:
        given = locals()
        check_choice("LeanMixedPrecision(precision)", precision, get_args(Choice))
        check_choice("LeanMixedPrecision(parameters)", parameters, get_args(Parameters))
        check_choice("LeanMixedPrecision(on_overflow_limit)", on_overflow_limit, get_args(OnLimit))
        if fp32_modules not in ((), []):
            check_layers("LeanMixedPrecision(fp32_modules)", fp32_modules)
        if max_consecutive_overflows is not None:
            check_positive_int("LeanMixedPrecision(max_consecutive_overflows)", max_consecutive_overflows)
        check_kind("LeanMixedPrecision(scaler)", scaler, GradScaler | None, "a torch.amp.GradScaler or None")
        for name in ("low_precision_norms", "recast_in_backward", "check_updates", "hold_lr_on_overflow"):
            check_bool(f"LeanMixedPrecision({name})", given[name])
        patterns = (fp32_modules,) if isinstance(fp32_modules, str | type) else tuple(fp32_modules)
        if "auto" in patterns:
            raise ValueError("LeanMixedPrecision(fp32_modules) cannot be 'auto': name the modules that need float32.")
        self.settings = Settings(patterns, low_precision_norms, recast_in_backward, parameters, check_updates)
        choice: Any = None if precision == "auto" else _PRECISIONS.get(precision, precision)
        _check_combination(choice, self.settings, scaler)
        self._holds_lr, self._on_limit = hold_lr_on_overflow, on_overflow_limit
        self._choice: Precision16 | None = choice
        self._max_consecutive = max_consecutive_overflows
        self._num_overflows = self._num_consecutive = 0  # skipped steps, and the last ones in a row
        # Lightning's names; "auto" is resolved when the device is known.
        self.precision = choice or "bf16-mixed"
        self.device = current_kind()
        self.scaler = self._given_scaler = scaler
        self._run: PrecisionRun | None = None
        self._has_fallen_back = False
        self._ended: dict[str, Any] = {}  # the state of the last fit, once it has ended

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.precision!r})"

    @property
    def overflow_steps(self) -> int:
        """Optimizer steps that were skipped so far, including the last one."""
        scaling = self._run.scaling if self._run is not None else None
        return self._num_overflows + (scaling.num_overflowed if scaling is not None else 0)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run out of copies, such as those of the trainer in worker processes."""
        return vars(self) | {"_run": None}

    # --- set up and undo ---

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, pl.LightningModule)
        trainer = module.trainer
        is_training = trainer.state.fn == TrainerFn.FITTING
        self._refuse_trainer(trainer, is_training=is_training)
        self.teardown()  # of an interrupted run
        self.device = trainer.strategy.root_device.type
        precision = resolve_precision(self._choice, self.device)
        _check_combination(precision, self.settings, self._given_scaler if self._choice else None)
        self._run = PrecisionRun(module, trainer, self.settings, is_training=is_training)
        if is_training:
            self._has_fallen_back, self._num_consecutive, self._ended = False, 0, {}
        if not self._has_fallen_back:  # else evaluations compute as the fit did in the end
            self.precision = precision
            is_scaled = precision == "16-mixed"
            self.scaler = self.scaler or self._given_scaler or GradScaler(self.device) if is_scaled else None
        return module

    def _refuse_trainer(self, trainer: pl.Trainer, *, is_training: bool) -> None:
        """Refuse a second run at a time, DeepSpeed, and callbacks that put float32 weights among bf16 parameters."""
        running = self._run.trainer if self._run is not None else None
        if running is not None and running is not trainer and running.state.status == TrainerStatus.RUNNING:
            raise MisconfigurationException(
                "This LeanMixedPrecision belongs to a trainer that is running: create another one."
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                "LeanMixedPrecision does not work with DeepSpeedStrategy: use Trainer(precision=...) there."
            )
        if is_training and self.settings.is_lean:
            name = f"LeanMixedPrecision(parameters={self.settings.parameters!r})"
            refuse_callbacks(name, trainer, _REFUSED_CALLBACKS)

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if self._run is not None and self._run.is_training:
            scaler = self.scaler if self.scaler is not None and self.scaler.is_enabled() else None
            self._run.connect(optimizers, lr_schedulers, scaler, self._note_overflows, holds_lr=self._holds_lr)
        return model, optimizers, lr_schedulers

    @override
    def teardown(self) -> None:
        if self._run is not None:
            if self._run.is_training:
                self._ended = self._run.state_dict()
            self._run.remove()
            self._run = None

    # --- a step ---

    @override
    def autocast_context_manager(self) -> torch.autocast:
        dtype = _DTYPES.get(self.precision)
        # Its own cache keeps copies of all weights under no_grad and in checkpointed layers.
        return torch.autocast(self.device, dtype=dtype, enabled=dtype is not None, cache_enabled=False)

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        settings = self.settings
        mixes_layers = bool(settings.fp32_modules) or settings.low_precision_norms or settings.is_lean
        with (
            self.autocast_context_manager(),
            without_fast_path() if mixes_layers and self.device != "cuda" else nullcontext(),
            self._run.in_step() if self._run is not None else nullcontext(),
        ):
            yield

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        with self.forward_context():
            yield
        if self._run is not None:
            if not self._run.module.automatic_optimization:
                self._end_scaled_steps(self._run)
            self._run.warn_of_idle_islands()

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        if self._run is not None and self._run.scaling is not None:
            tensor = self._run.scaling.scale(tensor)
        return Precision.pre_backward(self, tensor, module)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        with torch.autocast(self.device, enabled=False):  # on in manual optimization, whose training step calls it
            try:
                super().backward(tensor, model, optimizer, *args, **kwargs)
            except RuntimeError as error:
                reads_weights = self.settings.is_lean or self.settings.recast_in_backward
                if reads_weights and "modified by an inplace operation" in str(error):
                    error.add_note(
                        "If an optimizer has stepped since this forward, it has overwritten weights that the backward "
                        "needs: step after all backwards of a forward, or use LeanMixedPrecision without parameters "
                        "and recast_in_backward."
                    )
                raise

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        assert self._run is not None
        self._run.has_skipped = False
        if torch.is_autocast_enabled(self.device):  # in manual optimization, whose closure holds a forward
            closure = self.autocast_context_manager()(closure)
        with torch.autocast(self.device, enabled=False):
            if self._run.scaling is not None:
                return self._scaled_step(self._run, self._run.scaling, optimizer, closure, **kwargs)
            result = Precision.optimizer_step(self, optimizer, model=model, closure=closure, **kwargs)
        share = None if self._run.lean is None else self._run.lean.check.share
        if share is not None:  # of updates that rounding undid in this step, if it was counted
            log_of_step(self._run.module, {"vram/lost_updates": share})
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val > 0 and self._run is not None:
            self._run.unscale(optimizer)
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.settings.is_lean:
            clip_gradient_norm(self.main_params(optimizer), clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)

    def _scaled_step(
        self, run: PrecisionRun, scaling: LossScaling, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()
        has_gradients = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if run.module.automatic_optimization and result is None and not has_gradients:
            call_after_closure(self, run.module, optimizer)
            return None
        scaling.unscale(optimizer)
        call_after_closure(self, run.module, optimizer)
        output = scaling.step(optimizer, **kwargs)
        if run.module.automatic_optimization:
            self._end_scaled_steps(run)
        return result if result is not None else output

    # --- the loss scale ---

    def _end_scaled_steps(self, run: PrecisionRun) -> None:
        """Update the scale, log it, and act on overflows: after a step, or after a training step that has its own."""
        if run.scaling is None:
            return
        run.scaling.update()
        scale = run.scaling.scaler.get_scale
        if is_logging(run.module, always=self._num_consecutive > 0):
            log_of_step(run.module, {"vram/overflow_steps": float(self._num_overflows), "vram/loss_scale": scale()})
        run.has_skipped = self._num_consecutive > 0
        limit = self._max_consecutive
        # A search for the learning rate goes on until the training diverges.
        if limit is None or self._num_consecutive < limit or is_searching_rate(run.trainer.callbacks):  # type: ignore[attr-defined]
            return
        steps = f"gradients overflowed in {self._num_consecutive} optimizer steps in a row"
        if self._on_limit == "error":
            raise FloatingPointError(
                f"LeanMixedPrecision(precision='fp16'): {steps}, down to a loss scale of {scale():g}: the training has "
                "diverged, or the model leaves the range of float16. Lower the learning rate, name the layers that "
                "overflow in fp32_modules=[...], use LeanMixedPrecision('bf16'), or on_overflow_limit='bf16' to "
                "continue in bfloat16."
            )
        rank_zero_warn(f"LeanMixedPrecision: {steps}. Training continues in {self._on_limit}.")
        self._fall_back(run)

    def _note_overflows(self, num_overflowed: int) -> None:
        """Count steps between two updates of the scale, of which some overflowed."""
        self._num_overflows += num_overflowed
        self._num_consecutive = self._num_consecutive + 1 if num_overflowed else 0

    def _fall_back(self, run: PrecisionRun) -> None:
        self._has_fallen_back = True
        self.precision = "bf16-mixed" if self._on_limit == "bf16" else "32-true"
        self._num_consecutive = 0
        if run.scaling is not None:
            run.scaling.stop()
        run.end_scaling()
        self.scaler = None

    # --- checkpoints ---

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {
            "precision": self.precision,
            "has_fallen_back": self._has_fallen_back,
            "overflows": {"num_steps": self._num_overflows, "num_consecutive": self._num_consecutive},
        }
        if self.scaler is not None and self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        return state | (self._run.state_dict() if self._run is not None else self._ended)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "scale" in state_dict:  # of GradScaler.state_dict: all that Lightning's plugins save
            if self.scaler is not None:
                self.scaler.load_state_dict(state_dict)
            return
        if self._run is None or not self._run.is_training:  # an evaluation does not change the state of the fit
            return
        overflows = state_dict["overflows"]
        self._num_overflows, self._num_consecutive = overflows["num_steps"], overflows["num_consecutive"]
        if state_dict["has_fallen_back"]:
            self._num_consecutive = 0
            if self.scaler is not None and self._on_limit != "error":
                self._fall_back(self._run)
        if self.scaler is not None and "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
        self._run.load_state_dict(state_dict)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None and self.scaler.is_enabled():
            checkpoint[_LIGHTNINGS] = self.scaler.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if type(self).__qualname__ not in checkpoint:  # otherwise Lightning loads it
            state = next((checkpoint[key] for key in _OTHERS if checkpoint.get(key)), None)
            if state is not None:
                self.load_state_dict(state)
        if self._run is not None:
            self._run.load_weights(checkpoint)


def resolve_precision(choice: Precision16 | None, device_type: str) -> Precision16:
    """Choose for a device: bf16 where its hardware computes in it, else fp16; or check what was chosen."""
    precision = choice or ("bf16-mixed" if has_native_bf16(device_type) else "16-mixed")
    try:
        with warnings.catch_warnings(action="error", category=UserWarning):  # torch only warns on some devices
            torch.autocast(device_type, dtype=_DTYPES[precision])
    except (RuntimeError, UserWarning) as error:
        other = "bf16" if precision == "16-mixed" else "fp16"
        raise MisconfigurationException(
            f"LeanMixedPrecision(precision={'fp16' if precision == '16-mixed' else 'bf16'!r}) does not work on "
            f"{device_type!r} devices: {str(error).rstrip('.')}. Use {other!r}, or Trainer(precision='32-true') "
            "without this plugin."
        ) from error
    return precision


def _check_combination(precision: str | None, settings: Settings, scaler: object) -> None:
    """Refuse a scaler with bfloat16, bfloat16 weights with float16, and a count of lost updates where none is lost."""
    if precision == "bf16-mixed" and scaler is not None:
        raise ValueError("LeanMixedPrecision(scaler) is for 'fp16', got one with 'bf16', which has none. Leave it out.")
    if precision == "16-mixed" and settings.is_lean:
        raise ValueError(f"LeanMixedPrecision(parameters={settings.parameters!r}) needs precision='bf16', got 'fp16'.")
    if settings.check_updates and settings.parameters not in ("bf16+kahan", "bf16+stochastic"):
        raise ValueError(
            "LeanMixedPrecision(check_updates=True) needs parameters='bf16+kahan' or 'bf16+stochastic', which lose "
            f"updates, got {settings.parameters!r}."
        )
