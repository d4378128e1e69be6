"""Traced steps of schemes, on fake tensors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_vram.estimation.batches import batch_size_of
from lightning_vram.estimation.estimate import Progress, spec_of
from lightning_vram.estimation.stages import needed_bytes
from lightning_vram.estimation.step_time import bus_bytes_per_s
from lightning_vram.estimation.traced_fit import STEP, FitRun, trace_fit
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.workspaces import Workspaces, workspaces_of
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.units import KIB
from lightning_vram.planner.measured import Measured
from lightning_vram.planner.remedies import has_plain_strategy, may_be_guarded
from lightning_vram.planner.scheme import Scheme
from lightning_vram.planner.words import peak_words

HOST = "cpu"
# Samples of results and generator states, which features store only in real runs.
_UNSEEN_BYTES, _UNSEEN_SHARE = 64 * KIB, 0.001
_FORWARD_SHARE = 0.3  # of a step: the rest is backward and optimizer
_STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)


class TracedSteps:
    """Traces steps of schemes on fake tensors; once ``is_late()``, only the baseline.

    ``guards`` are callbacks that repeat a step after OOM, added if all parts allow it. ``tried`` has the traced steps
    in order; ``left_out`` the schemes that were too late.
    """

    def __init__(  # noqa: PLR0913 - by name
        self,
        module: pl.LightningModule,
        batch: Any,
        run: FitRun,
        on_progress: Progress | None = None,
        *,
        num_local_ranks: int = 1,
        guards: Sequence[Callback] = (),
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        self._module, self._run = module, run
        self._workspaces: Workspaces | None = None if run.card is None else workspaces_of(run.card)
        self._progress = on_progress or (lambda stage, done: None)
        self._num_runs, self._num_local_ranks, self._guards = 0, num_local_ranks, guards
        self.own, self.batch, self.num_ranks = run.trainer_arguments, batch, run.num_ranks
        self.batch_size = batch_size_of(batch) or 0
        self._is_late = is_late
        self.tried: list[Measured] = []
        self.left_out: list[Scheme] = []

    @property
    def device(self) -> DeviceSpec:
        """The device of the steps."""
        return self._run.card or spec_of(HOST)

    @property
    def may_choose_strategy(self) -> bool:
        """Whether a strategy may offload weights and states: on a GPU, with the default strategy."""
        return self._run.card is not None and has_plain_strategy(self.own)

    def travel_bytes(self, seconds: float) -> int:
        """Return the D2H bytes during the forward of a step of so many seconds."""
        return 0 if self._run.card is None else int(bus_bytes_per_s(self._run.card) * seconds * _FORWARD_SHARE)

    def of(self, batch: Any, num_ranks: int) -> "TracedSteps":
        """Return tracing with another batch, or on more devices."""
        run, more = replace(self._run, num_ranks=num_ranks), {"num_local_ranks": self._num_local_ranks}
        return TracedSteps(self._module, batch, run, self._progress, guards=self._guards, is_late=self._is_late, **more)

    def __call__(self, scheme: Scheme) -> Measured | None:
        """Trace one; ``None`` if a feature refuses this run, or it is late."""
        if scheme.parts and self._is_late():
            self.left_out += [] if scheme in self.left_out else [scheme]
            return None
        self._progress(f"tracing {scheme}", 1 - 0.9**self._num_runs)
        self._num_runs += 1
        try:
            own = dict(self.own)
            if self._guards and may_be_guarded(part.name for part in scheme.parts):
                own["callbacks"] = [*own["callbacks"], *self._guards]
            run = replace(self._run, trainer_arguments=scheme.trainer_kwargs(own))
            traced = trace_fit(self._module, self.batch, run)
        except Exception:
            if not scheme.parts:  # the user's own run
                raise
            return None
        num_bytes = needed_bytes(traced, self._workspaces)
        measured = Measured(
            scheme,
            num_bytes + (_UNSEEN_BYTES + int(_UNSEEN_SHARE * num_bytes) if scheme.parts else 0),
            traced.stage(STEP).peak_of(Category.ACTIVATIONS),
            traced.times[STEP],
            sum(traced.timeline.peak_by_category[category] for category in _STATES),
            peak_words(traced.timeline),
            traced.layers,
            traced.host_bytes * self._num_local_ranks,
        )
        self.tried.append(measured)
        return measured
