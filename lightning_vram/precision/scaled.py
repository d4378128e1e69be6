"""Compute with a loss scale, until too many steps in a row have overflowed; and save it in checkpoints."""

from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_vram.memory.device.accelerators import current_kind
from lightning_vram.precision.choice import Precision16
from lightning_vram.precision.overflow_watch import OnLimit, OverflowWatch
from lightning_vram.precision.run import PrecisionRun
from lightning_vram.precision.scaled_steps import ScaledSteps
from lightning_vram.techniques.mixed_precision import without_optimizers

_LIGHTNINGS = "MixedPrecision"
_OTHERS = ("LeanMixedPrecision", _LIGHTNINGS, "FSDPPrecision")  # Lightning keeps states by the name of the class


class ScaledPrecision(MixedPrecision):
    """Loss scaling of :class:`LeanMixedPrecision`, and what it keeps from one run to the next."""

    precision: Any  # "32-true" after a fall-back

    def __init__(
        self,
        choice: Precision16 | None,
        max_consecutive_overflows: int | None,
        on_limit: OnLimit,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._choice = choice
        self._on_limit = on_limit
        self._overflows = OverflowWatch(max_consecutive_overflows)
        self._given_scaler = scaler
        # Lightning's names; what "auto" stands for is known when the device is.
        self.precision = choice or "bf16-mixed"
        self.device = current_kind()
        self.scaler = scaler
        self._run: PrecisionRun | None = None
        self._has_fallen_back = False
        self._ended: dict[str, Any] = {}  # the state of the last fit, once it has ended

    @property
    def overflow_steps(self) -> int:
        """Optimizer steps that were skipped so far, including the last one."""
        return self._overflows.num_steps + (self._steps.num_overflowed if self._steps is not None else 0)

    @property
    def _steps(self) -> ScaledSteps | None:
        """Those of a fit in float16."""
        return self._run.steps if self._run is not None else None

    def __getstate__(self) -> dict[str, Any]:
        """In a copy, such as worker processes get of the trainer, there is no run."""
        return vars(self) | {"_run": None, "scaler": self.scaler and without_optimizers(self.scaler)}

    def _after_scale_moved(self, num_overflowed: int) -> None:
        run = self._run
        assert run is not None
        assert run.steps is not None
        is_enough = self._overflows.note(num_overflowed)
        self._overflows.log(run.module, run.steps.scaling)
        if num_overflowed and run.paused is not None:
            run.paused.pause()
        if is_enough and not run.is_tuning:
            if self._on_limit == "error":
                raise self._overflows.error(run.steps.scaling.scale_value)
            rank_zero_warn(
                f"LeanMixedPrecision: gradients overflowed in {self._overflows.num_consecutive} optimizer steps in a "
                f"row. Training continues in {self._on_limit}."
            )
            self._fall_back(run)

    def _start_in(self, precision: Precision16, run: PrecisionRun | None) -> None:
        self._has_fallen_back = False
        self.precision = precision
        if precision != "16-mixed":
            self.scaler = None
            return
        self.scaler = self.scaler or self._given_scaler or torch.amp.GradScaler(self.device)
        if run is not None:
            run.steps = ScaledSteps(self.scaler, run.over_ranks(), self._after_scale_moved)

    def _fall_back(self, run: PrecisionRun) -> None:
        self._has_fallen_back = True
        self.precision = "bf16-mixed" if self._on_limit == "bf16" else "32-true"
        self._overflows.num_consecutive = 0
        if run.steps is not None:
            run.steps.scaling.end()
        run.end_scaling()
        self.scaler = None

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {
            "precision": self.precision,
            "has_fallen_back": self._has_fallen_back,
            "overflows": self._overflows.state_dict(),
        }
        if self.scaler is not None and self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        return state | (self._run.state_dict() if self._run is not None else self._ended)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "scale" in state_dict:  # of GradScaler.state_dict: all that Lightning's plugins keep
            self._load_scale(state_dict)
            return
        if self._run is None or not self._run.changes.is_training:  # an evaluation says nothing about the fit before
            return
        self._overflows.load_state_dict(state_dict["overflows"])
        if state_dict["has_fallen_back"]:
            self._overflows.num_consecutive = 0
            if self.scaler is not None and self._on_limit != "error":
                self._fall_back(self._run)
        elif self._has_fallen_back:  # in a search for a batch size, say
            self._start_in("16-mixed", self._run)
            assert self._run.steps is not None
            self._run.steps.begin(self._run.trainer.optimizers)
        self._load_scale(state_dict.get("scaler", {}))
        self._run.load_state_dict(state_dict)

    def _load_scale(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None and self.scaler.is_enabled():
            checkpoint[_LIGHTNINGS] = self.scaler.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if type(self).__qualname__ not in checkpoint:  # else Lightning hands it over by itself
            state = next((checkpoint[key] for key in _OTHERS if checkpoint.get(key)), None)
            if state is not None:
                self.load_state_dict(state)
        if self._run is not None:
            self._run.load_weights(checkpoint)
